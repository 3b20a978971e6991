"""A computer-use tool: a model uses a web page by mouse and keyboard, and each action returns a screenshot.

The page is Penstock's own dashboard. The reward is where the page ends, not what the model says of it.

    PENSTOCK_TOKEN=SECRET penstock dashboard data/vision/runs --port 8600
    PENSTOCK_SCREEN_TOKEN=SECRET penstock rehearse recipes/vision/screen.yaml --policy …

Needs `pip install playwright` and a Chromium: one on PATH, or the program that PENSTOCK_CHROMIUM names.
"""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from penstock.sandbox import Sandbox
from penstock.tools import BaseTool, ToolInfraError, ToolResult
from penstock.transfer_queue import Task

VIEWS: Mapping[str, str] = {"curves": "2", "trajectories": "3", "dead letters": "4", "compare": "5"}
"""Views of the dashboard besides the one it opens with → the key of each."""
NAMES = {"dead letters": "letters"}
"""Names in the page's address."""
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
KEYS = ("Enter", "Escape", "Tab", "Backspace", "Home", "End", "ArrowUp", "ArrowDown", "ArrowLeft", "ArrowRight")
"""Besides keys that write one character."""
NEEDED = {"look": (), "click": ("x", "y"), "type": ("text",), "press": ("text",)}
"""Action → the other arguments that it needs."""


def address_of(run: str, view: str) -> str:
    """Returns the address of a view: the part behind `#`."""
    return f"/{run}/{NAMES.get(view, view)}"


@dataclass(slots=True)
class Visit:
    """One episode's tab, in a browser context that shares nothing with other episodes."""

    context: Any
    page: Any
    target_page: str
    """The address at which the page has to end."""


class DashboardScreen(BaseTool):
    """One Chromium per worker. The page follows from the actions, so that a repeated episode can replay them."""

    name = "computer"
    description = "Looks at the screen, clicks at x, y, types a text or presses a key. You see the screen afterwards."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "action": {"type": "string", "enum": list(NEEDED)},
            "x": {"type": "integer"},
            "y": {"type": "integer"},
            "text": {"type": "string"},
        },
        "required": ["action"],
    }

    def __init__(
        self,
        sandbox: Sandbox | None = None,
        *,
        url: str = "http://127.0.0.1:8600/",
        token_env: str = "PENSTOCK_SCREEN_TOKEN",  # noqa: S107 - the name of a variable
        width: int = 644,
        height: int = 448,
        settle_s: float = 0.5,
        page_timeout_s: float = 20.0,
    ) -> None:
        """
        Args:
            url: of the dashboard. Nothing from any other host is loaded.
            token_env: environment variable with the dashboard's token.
            width, height: of the screen, in pixels.
            settle_s: between an action and its screenshot.
            page_timeout_s: deadline of each step of an action.
        """
        super().__init__(sandbox)
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, not {url!r}")
        self._url, self._token_env = url, token_env
        self._size = width, height
        self._settle_s, self._page_timeout_s = settle_s, page_timeout_s
        self._starting = asyncio.Lock()
        self._driver: Any = None
        self._browser: Any = None

    # an episode ----------------------------------------------------------------------------------------------------
    async def create(self, task: Task) -> Visit:
        """Raises `ToolInfraError` if Chromium, the dashboard or a token for it is missing."""
        width, height = self._size
        browser = await self._started()
        context = await browser.new_context(viewport={"width": width, "height": height})
        try:
            return Visit(context, await self._signed_in(context), str(task.ground_truth))
        except BaseException:
            await context.close()
            raise

    async def execute(self, state: Visit, arguments: Mapping[str, Any]) -> ToolResult:
        from playwright.async_api import Error

        if problem := self._problem_with(arguments):
            return ToolResult(problem, is_error=True)
        try:
            match arguments["action"]:
                case "click":
                    await state.page.mouse.click(arguments["x"], arguments["y"])
                case "type":
                    await state.page.keyboard.type(arguments["text"])
                case "press":
                    await state.page.keyboard.press(arguments["text"])
            await asyncio.sleep(self._settle_s)
            png = await state.page.screenshot()
        except Error as error:
            raise _failed(error) from error
        return ToolResult("", images=(f"data:image/png;base64,{base64.b64encode(png).decode()}",))

    async def calc_reward(self, state: Visit) -> float:
        """1 where the page is at the wanted address, else 0."""
        return float(urlsplit(state.page.url).fragment.partition("?")[0] == state.target_page)

    async def release(self, state: Visit) -> None:
        await state.context.close()

    def _problem_with(self, arguments: Mapping[str, Any]) -> str | None:
        """A mistake of the model, in words that it can act on."""
        action, (width, height) = arguments["action"], self._size
        if missing := [name for name in NEEDED[action] if name not in arguments]:
            return f"{action} needs {' and '.join(missing)}"
        if action == "click" and not (0 <= arguments["x"] < width and 0 <= arguments["y"] < height):
            return f"{arguments['x']}, {arguments['y']} is outside of the screen, which is {width} by {height}"
        if action == "press" and len(arguments["text"]) != 1 and arguments["text"] not in KEYS:
            return f"there is no key {arguments['text']!r}: one character, or {', '.join(KEYS)}"
        return None

    # the browser ---------------------------------------------------------------------------------------------------
    async def _started(self) -> Any:
        from playwright.async_api import Error, async_playwright

        async with self._starting:  # episodes begin at the same time: the first one starts it for all
            if self._browser is None or not self._browser.is_connected():
                await self.close()
                self._driver = await async_playwright().start()
                try:
                    self._browser = await self._driver.chromium.launch(executable_path=_program())
                except Error as error:
                    raise _failed(error) from error
            return self._browser

    async def _signed_in(self, context: Any) -> Any:
        from playwright.async_api import Error

        token = os.environ.get(self._token_env)
        if not token:
            raise ToolInfraError("browser", f"set {self._token_env} to the token of the dashboard at {self._url}")
        try:
            await context.route("**/*", self._only_the_dashboard)
            page = await context.new_page()
            page.set_default_timeout(self._page_timeout_s * 1000)
            await page.goto(self._url)
            await page.fill("#token", token)
            await page.keyboard.press("Enter")
            await page.wait_for_selector("nav a[aria-current]")
        except Error as error:
            raise _failed(error) from error
        return page

    async def _only_the_dashboard(self, route: Any) -> None:
        if urlsplit(route.request.url).netloc == urlsplit(self._url).netloc:
            await route.continue_()
        else:
            await route.abort()

    async def close(self) -> None:
        browser, driver = self._browser, self._driver
        self._browser = self._driver = None
        if browser is not None and browser.is_connected():
            await browser.close()
        if driver is not None:
            await driver.stop()


def _program() -> str:
    """Raises `ToolInfraError` where no Chromium is found."""
    names = (os.environ.get("PENSTOCK_CHROMIUM", ""), *PROGRAMS)
    program = next(filter(None, map(shutil.which, filter(None, names))), None)
    if program is None:
        raise ToolInfraError("browser", "no Chromium: install one, or name the program in PENSTOCK_CHROMIUM")
    return program


def _failed(error: Exception) -> ToolInfraError:
    return ToolInfraError("browser", str(error).partition("\n")[0] or type(error).__name__)


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> float:
    """Return the tool's reward; 0 for an episode that never used the tool."""
    return float((extra_info or {}).get("tool_rewards", {}).get(DashboardScreen.name, 0.0))
