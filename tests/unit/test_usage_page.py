"""What is kept of what the nodes use, and the table of it."""

from gang_views import Story, place

from metaflow_extensions.torchrun.plugins.torchrun.show.page import page_of
from metaflow_extensions.torchrun.plugins.torchrun.show.parts import Sentence, Table

LIMITS = {"cpus": 96.0, "memory_mib": 2.0**20, "gpus": 8.0, "gpu_memory_mib": 640 * 1024.0}


def told(story, node, of="container", **values):
    return story.report("usage", node, of=of, values=values, limits=LIMITS)


def section(story):
    """Return the table and the sentence below it."""
    (parts,) = [each.parts for each in page_of(story.view, place()).sections if each.name == "usage"]
    table, said = parts or (Table((), ()), Sentence(""))
    return table, said.text


def test_the_last_and_the_highest_values_are_kept_and_shown():
    story = Story().running()
    assert section(story)[0].rows == ()
    for cpus in (2.0, 4.5, 1.2345):
        told(story, 1, cpus=cpus, memory_mib=cpus * 1024)
    told(story, 0, cpus=1.5)
    table, said = section(story)
    assert table.header == ("node", "CPU, cores", "memory, GiB")
    assert table.rows == [
        ("0", "1.5, highest 1.5 of 96", ""),
        ("1", "1.23, highest 4.5 of 96", "1.23, highest 4.5 of 1024"),
    ]
    assert "the node's container" in said
    told(story, 0, "processes", gpu_memory_mib=96.0 * 1024, gpu_percent=95.0)
    table, said = section(story)
    assert table.header[3:] == ("GPUs, %", "GPU memory, GiB")
    assert table.rows[0][3:] == ("95, highest 95", "96, highest 96 of 640")
    assert "those of the machine" in said
