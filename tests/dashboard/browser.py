"""The page as a process, and a real Chromium that looks at it and notes whatever goes wrong there."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

REPOSITORY = Path(__file__).parents[2]
PROGRAMS = (os.environ.get("PENSTOCK_CHROMIUM", "chromium"), "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, PROGRAMS)), None)
START_S = 60
PATIENCE_MS = 60_000
PICTURES = os.environ.get("PENSTOCK_SCREENSHOTS")
"""A folder for the pictures of docs/guide/monitoring.md; unset: none are taken."""
FRAMES = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
MISSING = CHROMIUM is None or find_spec("playwright") is None
IN_BROWSER = [
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(MISSING, reason="no Chromium or playwright: scripts/setup-browser, pip install penstock[dev]"),
]


@contextlib.contextmanager
def page_process(runs_dir: Path) -> Iterator[str]:
    """`penstock dashboard` over a folder; gives its address. Its tokens are `writes` and `looks`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    environment |= {"PENSTOCK_TOKEN": "writes", "PENSTOCK_VIEW_TOKEN": "looks", "PYTHONPATH": str(REPOSITORY / "src")}
    argv = [sys.executable, "-m", "penstock.deploy.cli", "dashboard", str(runs_dir), "--port", "0"]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        yield _address(process)
    finally:
        process.terminate()
        process.wait(60)


def _address(process: subprocess.Popen[str]) -> str:
    """What it says when it listens; its later lines are read and dropped, or it would wait for somebody to."""
    assert process.stderr is not None
    late = threading.Timer(START_S, process.kill)
    late.start()
    said = []
    for line in process.stderr:
        said.append(line)
        if found := re.search(r"page: (\S+)", line):
            late.cancel()
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return found[1]
    raise AssertionError("the page did not start:\n" + "".join(said))


class Tab:
    """One tab. `trouble` is everything that a page in order never does."""

    def __init__(self, page: Any, url: str) -> None:
        self.page, self.url = page, url
        self.trouble: list[str] = []
        self.requests: list[str] = []
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: self.trouble.append(f"error: {error}"))
        page.on("dialog", lambda dialog: self.trouble.append(f"dialog: {dialog.message}"))
        page.on("console", self._on_console)
        page.on("request", self._on_request)

    def _on_console(self, message: Any) -> None:
        if message.type == "error" and "the server responded with a status" not in message.text:
            self.trouble.append(f"console: {message.text}")

    def _on_request(self, request: Any) -> None:
        self.requests.append(request.url)
        if urlsplit(request.url).netloc != urlsplit(self.url).netloc:
            self.trouble.append(f"request to {request.url}")

    async def sign_in(self, token: str = "writes") -> None:
        await self.page.goto(self.url)
        await self.page.fill("#token", token)
        await self.page.keyboard.press("Enter")
        await self.page.wait_for_selector("nav a[aria-current]")

    async def go(self, where: str, wait_for: str) -> None:
        await self.page.evaluate("where => { location.hash = where; }", where)
        await self.page.wait_for_selector(wait_for)

    async def press(self, *keys: str) -> None:
        for key in keys:
            await self.page.keyboard.press(key)

    async def text(self, selector: str = "#main") -> str:
        """Return the visible text. A turn has none in the frame that inserts it (`content-visibility: auto`)."""
        await self.page.evaluate(FRAMES)
        return str(await self.page.inner_text(selector))

    async def picture(self, name: str) -> None:
        if PICTURES:
            await self.page.screenshot(path=str(Path(PICTURES) / f"dashboard-{name}.png"))

    async def until(self, expression: str, argument: Any = None) -> None:
        """Wait until a JavaScript function of `argument` says true."""
        await self.page.wait_for_function(expression, arg=argument)


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Any]:
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        # A page in a container of CI has no user namespaces of its own.
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            await browser.close()
