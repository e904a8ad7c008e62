"""What is kept of what the nodes use, and the table of it."""

from gang_views import Story, place

from metaflow_extensions.torchrun.plugins.torchrun.show.page import page_of
from metaflow_extensions.torchrun.plugins.torchrun.show.parts import Sentence, Table

LIMITS = {"cpus": 96.0, "memory_mib": 2.0**20, "gpus": 8.0, "gpu_memory_mib": 640 * 1024.0}
OTHERS = ("gpu_memory_mib", "received_kib_s", "sent_kib_s", "output_bytes_s")


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
    told(story, 0, "processes", **dict.fromkeys(OTHERS, 96.0 * 1024), cpus=1.5, gpu_percent=95.0)
    table, said = section(story)
    titles = ("GPUs, %", "GPU memory, GiB", "received, MiB/s", "sent, MiB/s", "output, KiB/s")
    assert table.header == ("node", "CPU, cores", "memory, GiB", *titles)
    assert table.rows == [
        ("0", "1.5, highest 1.5 of 96", "", "95, highest 95", "96, highest 96 of 640", *["96, highest 96"] * 3),
        ("1", "1.23, highest 4.5 of 96", "1.23, highest 4.5 of 1024", *[""] * 5),
    ]
    assert all(part in said for part in ("the node's container", "those of the machine"))


def test_of_many_nodes_those_that_use_the_most_memory_are_shown():
    story = Story(300).running()
    for node in range(300):
        told(story, node, memory_mib=float(node))
    table, said = section(story)
    assert [row[0] for row in table.rows] == [str(node) for node in range(284, 300)]
    assert "Of 300 nodes, the 16" in said
