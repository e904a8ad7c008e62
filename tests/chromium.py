"""A headless Chromium, as far as tests of a page need one: its DevTools protocol over two pipes, no other package."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from flow_runs import TESTED_BY
from limits import eventually, limit_s

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
MISSING = "Chromium is not installed (apt-get install chromium), so NOBODY HAS LOOKED at the card in a browser"
REQUIRED = "BROWSER_REQUIRED"  # where this is set, a test fails without a browser
_ANSWER_S = 60.0
# No page of ours needs the network; Metaflow's style asks for a font there.
_OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost", "--remote-debugging-pipe", "about:blank",
)  # fmt: skip


class Chromium:
    """One browser with one page.

    A page takes a second or two to open, and some milliseconds to be seen another way. So open each page once, with
    `open`, and change its width and colours with `show_as`.
    """

    def __init__(self, program: str, folder: Path) -> None:
        commands, self._to = os.pipe()
        self._from, answers = os.pipe()
        # It reads commands from 3 and writes answers to 4.
        script = f'exec "$@" 3<&{commands} 4>&{answers}'
        words = [program, f"--user-data-dir={folder}", *_OPTIONS]
        env = {**os.environ, "HOME": str(folder), TESTED_BY: ""}  # it has a process that is nobody's child
        log = (folder / "log").open("wb")
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *words],
            pass_fds=(commands, answers), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True,
        )  # fmt: skip
        for unused in (commands, answers):
            os.close(unused)
        log.close()
        self._read = b""
        self._number = 0
        self._session: str | None = None

    def close(self) -> None:
        """End the browser and all its processes."""
        os.close(self._to)
        os.close(self._from)
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)

    @contextmanager
    def fresh_page(self) -> Iterator[None]:
        """Have an empty page, which knows nothing of those before it, for as long as the context lasts."""
        context = self._call("Target.createBrowserContext")["browserContextId"]
        target = self._call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Page.enable")
        try:
            yield
        finally:
            self._session = None
            self._call("Target.disposeBrowserContext", browserContextId=context)

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + limit_s(_ANSWER_S)
        while b"\0" not in self._read:
            assert time.monotonic() < deadline, "Chromium does not answer"
            piece = os.read(self._from, 1 << 20)
            assert piece, "Chromium has ended"
            self._read += piece
        first, _, self._read = self._read.partition(b"\0")
        return json.loads(first)

    def open(self, url: str, ready: str) -> None:
        """Open a page as it was shown last, and wait until the expression `ready` is true on it."""
        self._call("Page.navigate", url=url)
        self.wait_for(ready)

    def show_as(self, width: int, dark: bool = False) -> None:
        """Show the page so wide, in light or dark, and wait until it is drawn so; it is not loaded again."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        # The first frame runs what listens for a new size; what that has changed is drawn with the second.
        self.value_of("new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)))")

    def wait_for(self, expression: str) -> None:
        """Wait until an expression is true on the page."""
        eventually(lambda: self.value_of(f"Boolean({expression})"), lambda: f"{expression}\n{self.text}", limit_s(30.0))

    def value_of(self, expression: str) -> Any:
        """Return the value of an expression on the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    @property
    def text(self) -> str:
        """What a person can read on the page."""
        return self.value_of("document.body ? document.body.innerText : ''")

    def screenshot(self, path: Path, height: int = 3000) -> None:
        """Save a picture of the page from its top, at most so high."""
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], height), "scale": 1}
        data = self._call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """Return the browser of all tests, or say clearly that there is none."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        (pytest.fail if os.environ.get(REQUIRED) else pytest.skip)(MISSING)
    browser = Chromium(program, tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def chromium(browser: Chromium) -> Iterator[Chromium]:
    """Return the browser with a page for this test alone."""
    with browser.fresh_page():
        yield browser
