"""The gang's card, as Metaflow makes, stores and serves it, and as a browser shows it."""

from __future__ import annotations

import json
import random
import re
import socket
import sys
import urllib.request
from contextlib import contextmanager, suppress

import pytest
from flow_runs import content_of
from gang_views import Story, crash
from limits import eventually

from metaflow_extensions.torchrun.plugins.torchrun.show.gang_card import page_of_gang, sections_of_gang
from metaflow_extensions.torchrun.plugins.torchrun.show.words import ranks_on

pytestmark = pytest.mark.xdist_group("card")

# How a page is looked at: its width, and whether in dark. It is loaded in the first way.
VIEWS = ((390, False), (1280, False), (1280, True), (390, True))
# What a browser has when all of a page stands there.
READY = "document.querySelector('.tr-verdict') && document.querySelector('.vega-embed canvas, .vega-embed svg')"
# What holds when all of it, and so the chart too, is as wide as the screen and no wider. A chart that is drawn again,
# for new data or another width, is gone for a moment.
FITS = """READY && document.documentElement.scrollWidth <= WIDTH && (chart => 250 < chart && chart <= WIDTH)(
    document.querySelector('.vega-embed').getBoundingClientRect().width)""".replace("READY", READY)
HOSTILE_HOST = "<img src=x onerror='window.hit = 1'>"


class Cards:
    """Flows with the gang's card, and Metaflow's server for it."""

    def __init__(self, start_flow):
        self._start_flow = start_flow

    def start(self, *arguments, own="", **options):
        return self._start_flow(*arguments, env={"GANG_CARD": own or "1"}, stand_in=True, **options)

    def run(self, *arguments, expect=0, **options):
        flow = self.start(*arguments, **options)
        assert flow.wait() == expect, flow.text
        return flow

    def path(self, flow, kind="torchrun", node=0):
        """Return the path of a node's card on the server; wait for it."""

        def found():
            for path in flow.home.parent.rglob(f"runs/{flow.run_id}/steps/train/tasks/*/cards/{kind}-*.html"):
                task, name = path.parts[-3], path.stem.removeprefix(f"{kind}-")
                if int(task.partition("_node_")[2] or 0) == node:
                    return f"GangFlow/{flow.run_id}/train/{task}/{name}"
            return None

        return eventually(found, lambda: flow.text)

    @contextmanager
    def served(self):
        """Run Metaflow's server, and yield a function that gets something from it."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        server = self.start("server", "--port", str(port), command="card")

        def answer(path):
            with suppress(OSError):
                return urllib.request.urlopen(f"http://localhost:{port}/{path}").read().decode()

        def ask(path):
            return eventually(lambda: answer(path), lambda: f"{path}: {server.text}")

        ask.at = f"http://localhost:{port}/card/"
        try:
            ask("runinfo")
            yield ask
        finally:
            server.process.terminate()
            server.wait()


@pytest.fixture(scope="module")
def cards(start_shared_flow):
    return Cards(start_shared_flow)


@pytest.fixture(scope="module")
def live(cards):
    """A gang of 2 x 2 that goes on until a test tells it to end, with its server."""
    flow = cards.start(own="own", attrs={"nproc_per_node": 2}, do="*:talk,*:tell,*:wait")
    flow.await_notes("worker-launch0-0-*", 4)
    with cards.served() as ask:
        yield flow, ask
        (flow.out / "go-launch0-0").touch()
        assert flow.wait() == 0, flow.text


@pytest.fixture(scope="module")
def ended(cards):
    """Gangs that have ended, with a server: their cards by what has become of them."""
    attrs = {"nproc_per_node": 2, "max_restarts": 1}
    flows = {
        "failed": cards.start(own="own", attrs={"nproc_per_node": 2}, do="3:raise,*:sleep"),
        "restarted": cards.start(attrs=attrs, do="1:once,*:talk,*:tell"),
        "finished": cards.start(own="own", attrs={"nproc_per_node": 2}, do="*:talk"),
    }
    for name, flow in flows.items():
        assert flow.wait() == (name == "failed"), flow.text
    with cards.served() as ask:
        yield flows, ask


def await_data(ask, path, words="", count=1):
    """Return the newest data of a card that is live, once it has these words so often."""

    def found():
        with suppress(KeyError, json.JSONDecodeError):
            data = json.loads(ask(f"data/{path}"))["payload"]
            return data if json.dumps(data).count(words) >= count else None

    return eventually(found, f"{words} on {path}")


def look(browser, url):
    """Open a page; yield when it is shown on a phone and on a screen, in light and dark.

    The page is loaded once, by a phone, and then shown in the other ways. To look at another page costs about three
    seconds if its run is one of `ended`, and ten more for a run of its own: add what it shall show to one of those.
    """
    browser.show_as(*VIEWS[0])
    browser.open(url, READY)
    for width, dark in VIEWS:
        browser.show_as(width, dark)
        browser.wait_for(FITS.replace("WIDTH", str(width)))
        assert browser.value_of("window.hit") is None, "a text of ours was run"
        back, front = browser.value_of(
            "(() => { const style = getComputedStyle(document.querySelector('.mf-card'));"
            " return [style.backgroundColor, style.color]; })()"
        )
        is_dark = [sum(map(int, re.findall(r"\d+", colour)[:3])) < 380 for colour in (back, front)]
        assert is_dark == [dark, not dark], (back, front)
        yield width


def test_a_browser_shows_a_running_gang_and_it_moves(cards, live, chromium):
    flow, ask = live
    path = cards.path(flow)
    await_data(ask, path, "tr-cell tr-running", 4)
    data = await_data(ask, path, "CPU, cores")
    html = ask(f"card/{path}")
    assert (data["reload_token"], 'METAFLOW_RELOAD_TOKEN = "runtime"' in html) == ("runtime", True)
    assert set(data["data"]) <= set(re.findall(r'"id": "([\w-]+)"', content_of(html)))
    for _ in look(chromium, ask.at + path):
        chromium.value_of(f"window.metaflow_card_update({json.dumps(await_data(ask, path)['data'])})")
        chromium.wait_for("document.querySelectorAll('.tr-cell.tr-running').length === 4")
        # The page was made before anything was measured.
        chromium.wait_for("document.body.innerText.includes('CPU, cores')")
        assert "CPU and memory are those of the launch's processes" in chromium.text
    told = await_data(ask, path, "step 20 of 40 (50 %)")["data"]
    for _ in range(2):  # what was told after the page was loaded, and once more
        chromium.value_of(f"window.metaflow_card_update({json.dumps(told)})")
        chromium.wait_for("document.body.innerText.includes('step 20 of 40 (50 %)')")
        # There is one for each key.
        chromium.wait_for("document.querySelectorAll('[data-section-id=Progress] .vega-embed').length >= 4")
        chromium.wait_for("document.body.innerText.includes('best: 1.798e+308')")
    before = chromium.value_of("document.querySelector('.tr-sentence').innerText")
    assert re.search(r"4 ranks on 2 nodes have trained \d+ ", before)
    own = cards.path(flow, "default-own")
    data = await_data(ask, own, "tr-cell tr-running", 4)["data"]
    chromium.open(ask.at + own, READY)
    chromium.value_of(f"window.metaflow_card_update({json.dumps(data)})")
    chromium.wait_for("document.querySelectorAll('.tr-cell.tr-running').length === 4")
    chromium.wait_for(FITS.replace("WIDTH", str(VIEWS[-1][0])))
    assert chromium.text.index("Mine") < chromium.text.index("4 ranks on 2 nodes have trained")
    chromium.open(ask.at + path, READY)
    (flow.out / "go-launch0-0").touch()
    newest = await_data(ask, path, "ended well")
    if newest["reload_token"] == "runtime":
        chromium.value_of(f"window.metaflow_card_update({json.dumps(newest['data'])})")
    else:
        chromium.open(ask.at + path, READY)
    chromium.wait_for("document.body.innerText.includes('4 ranks on 2 nodes have ended well: trained')")
    assert chromium.value_of("document.querySelectorAll('.tr-cell.tr-done').length") == 4


def test_the_card_of_a_failed_step_is_final_and_tells_why(cards, ended):
    flows, ask = ended
    for kind in ("torchrun", "default-own"):
        html = ask(f"card/{cards.path(flows['failed'], kind)}")
        assert 'METAFLOW_RELOAD_TOKEN = "final"' in html
        content = content_of(html)
        assert "Rank 3 on node 1" in content
        assert "in act&#10;  |     raise ValueError(&quot;bad" in content, "its lines and characters as they are"


def test_who_names_only_the_step_gets_the_gangs_card(cards, ended, tmp_path):
    """Other nodes' tasks have none, and their logs no error, also where they have a card of the user's."""
    flow, page = ended[0]["finished"], tmp_path / "page.html"
    _, run_id, step, control, _ = cards.path(flow).split("/")
    got = cards.run("get", f"{run_id}/{step}", str(page), "--type", "torchrun", command="card")
    assert f"Resolving card: GangFlow/{run_id}/{step}/{control}" in got.text.splitlines()
    assert "4 ranks on 2 nodes have ended well" in content_of(page.read_text())
    made = {path.parts[-3] for path in flow.home.parent.rglob(f"runs/{run_id}/steps/{step}/tasks/*/cards/torchrun-*")}
    assert made == {control}
    assert "Card render failed" not in flow.text
    content = content_of(ended[1](f"card/{cards.path(flow, 'default-own', node=1)}"))
    assert ("This is node 1 (host " in content, f": GangFlow/{run_id}/{step}/{control}." in content) == (True, True)


def test_a_card_can_be_made_again_from_what_is_stored(cards, ended):
    flows, ask = ended
    path = cards.path(flows["restarted"])
    _, run_id, step, task, _ = path.split("/")
    first = content_of(ask(f"card/{path}"))
    made = cards.run("create", f"{run_id}/{step}/{task}", "--type", "torchrun", command="card")
    short = re.search(r"hash: (\w+)", made.text)[1]
    (again,) = made.home.parent.rglob(f"runs/{run_id}/steps/train/tasks/{task}/cards/torchrun-{short}*.html")
    assert content_of(again.read_text()) == first
    again.unlink()
    assert "have ended well" in first
    assert "after 1 restart" in first
    assert "step 20 of 40 (50 %)" in first
    (results,) = (task["results"] for task in flows["restarted"].note("end")["tasks"] if task["node"] == 1)
    told = {"step": 20, "total": 40, "loss": 0.1, "rank": 0.0, "best": sys.float_info.max, "tiny 🙂": 5e-324}
    assert [result["metrics"] for result in results] == [told]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("finished", ["done", "4 ranks on 2 nodes have ended well: trained", "rank 3", "PyTorch", "joined"]),
        ("failed", ["Rank 3 on node 1", "ValueError: bad löss", "raise ValueError(", "the launch has failed"]),
        ("restarted", ["done", "after 1 restart", "RuntimeError: only the first time"]),
    ],
)
def test_a_browser_shows_a_gang_that_has_ended(cards, ended, chromium, name, words):
    flows, ask = ended
    for _ in look(chromium, ask.at + cards.path(flows[name])):
        text = chromium.text
        assert [word for word in words if word not in text] == []
        assert "torch.distributed.run" in text
    empty = "[...document.querySelectorAll('section')].filter(s => s.querySelector('.sectionItems').matches(':empty'))"
    assert not any(chromium.value_of(f"{empty}.map(s => s.offsetHeight)")), "what has nothing to show is not seen"
    if name == "failed":
        assert chromium.value_of("document.querySelectorAll('.tr-cell.tr-failed').length") == 1
    if name == "restarted":
        assert "raise RuntimeError(" not in chromium.text
        chromium.value_of("document.querySelector('.tr-restart summary').click()")
        assert "raise RuntimeError(" in chromium.text


def page_of(view, folder):
    """Return where a page of a gang is, with what makes it anew."""
    where, page = "GangFlow/12/train/4", folder / "page.html"
    page.write_text(page_of_gang(where, view, is_final=False))
    return page.as_uri(), lambda later: sections_of_gang(where, later)


def test_what_a_reader_has_opened_stays_open_while_the_page_is_renewed(chromium, tmp_path):
    story = Story().running(policy={"max_restarts": 2}).at(9).crashed()
    url, renewed = page_of(story.view, tmp_path)
    later = story.at(14).report("started").report("wrote").at(15).view
    chromium.open(url, "document.querySelector('.tr-restart')")
    chromium.value_of("document.querySelector('.tr-restart summary').click()")
    chromium.value_of(f"window.metaflow_card_update({json.dumps(renewed(later))})")
    chromium.wait_for("document.querySelectorAll('.tr-cell.tr-running').length === 4")
    assert chromium.value_of("document.querySelector('.tr-restart').open")


def many_nodes(num_nodes=256, nproc=8):
    """Return what is known of a gang of many nodes, of which one has a bad name and another has failed twice."""
    chance, story = random.Random(11), Story(num_nodes, nproc, host="host-{}")
    for node in range(num_nodes):
        story.host = HOSTILE_HOST if node == 7 else "host-{}"
        story.at(90 * node / num_nodes).joined(node)
    story.at(110).ready(policy={"max_restarts": 1})
    kinds = ("cpus", "memory_mib", "gpu_percent", "gpu_memory_mib")
    for rank, text in ((900, "RuntimeError: lost once"), (1234, f"ValueError: {HOSTILE_HOST}")):
        story.at(story.now + 10).report("started").report("wrote")
        for node in range(num_nodes):
            values = {kind: 90 * chance.random() for kind in kinds}
            story.report("usage", node, of="container", limits={}, values=values)
        cause = crash(rank, text, rank // nproc, f"host-{rank // nproc}")
        story.at(story.now + 240).failed(cause).at(story.now + 5)
        for node in range(num_nodes):
            codes = [1 if each == rank else -15 for each in ranks_on(story.state.view, node)]
            story.ended(node, codes=codes)
        story.at(story.now + 2)
    return story.view


def test_a_browser_shows_a_gang_of_256_nodes(chromium, tmp_path):
    url, _ = page_of(many_nodes(), tmp_path)
    for _ in look(chromium, url):
        text = chromium.text
        for words in ("Rank 1234 on node 154", "2047 stopped", "failed: rank 1234 on node 154", HOSTILE_HOST):
            assert words in text
        assert chromium.value_of("document.querySelectorAll('.tr-cell').length") == 256
        assert "Of 256 nodes, the 16 that use the most memory are shown" in text
