"""The project's dashboard in a real Chromium, used by a tool that answers with screenshots."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.dashboard.browser import CHROMIUM, page_process
from tests.recipes.conftest import RECIPES, played
from tests.vision_model import save_vision_processor

from penstock.agent_loops import load_object
from penstock.tools import ToolInfraError
from penstock.transfer_queue import Task

pytest.importorskip("PIL", reason="Pillow is not installed: pip install 'penstock[vision]'")
pytest.importorskip("playwright", reason="playwright is not installed: pip install penstock[dev]")

pytestmark = [
    pytest.mark.deep,
    *(pytest.mark.recipes, pytest.mark.browser, pytest.mark.torch),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; scripts/setup-browser installs one"),
]
FOLDER = RECIPES / "vision"
PATIENCE_S = 120
Made = tuple[Path, str]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """The recipe's data, and the address of the dashboard over its run."""
    folder = tmp_path_factory.mktemp("screen")
    load_object(f"{FOLDER / 'data.py'}:main", Path.cwd())(["--out", str(folder), "--train", "1", "--eval", "1"])
    with page_process(folder / "runs") as url:
        yield folder, url


@pytest.fixture
def signed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the token that may look and change nothing."""
    monkeypatch.setenv("PENSTOCK_SCREEN_TOKEN", "looks")
    monkeypatch.setenv("PENSTOCK_CHROMIUM", str(CHROMIUM))


def made_tool(url: str, **settings: Any) -> Any:
    return load_object(f"{FOLDER / 'screen.py'}:DashboardScreen", Path.cwd())(url=url, page_timeout_s=60, **settings)


def task(wanted: str) -> Task:
    return Task("train/0", "train", [{"role": "user", "content": "Open it."}], "screen", wanted)


async def test_actions_are_answered_with_screenshots(page: Made, signed_in: None) -> None:
    """Two episodes at once share a browser and nothing else; mistakes are told, and leave the page as it is."""
    _, url = page
    tool = made_tool(url)
    try:
        acting, idle = [await tool.create(task(wanted)) for wanted in ("/demo/curves", "/demo/compare")]
        first = await screenshot(tool, acting, action="look")
        assert first.size == (644, 448)
        box = await acting.page.locator("nav a", has_text="curves").bounding_box()
        centre = {"x": int(box["x"] + box["width"] / 2), "y": int(box["y"] + box["height"] / 2)}
        clicked = await screenshot(tool, acting, unlike=first, action="click", **centre)
        assert clicked.tobytes() != first.tobytes(), "it shows the other view"
        assert [await tool.calc_reward(state) for state in (acting, idle)] == [1.0, 0.0]
        for wrong in (
            {"action": "click", "x": 644, "y": 0},
            {"action": "click", "x": 3},
            {"action": "press", "text": "Hyper"},
            {"action": "type"},
        ):
            told = await tool.execute(acting, wrong)
            assert (told.is_error, told.images) == (True, ())
        assert await tool.calc_reward(acting) == 1.0
        before = await screenshot(tool, idle, action="look")
        await screenshot(tool, idle, unlike=before, action="press", text="5")
        assert await tool.calc_reward(idle) == 1.0
        for state in (acting, idle):
            await tool.release(state)
    finally:
        await tool.close()


async def test_a_page_that_is_gone_is_no_mistake_of_the_model(page: Made, signed_in: None) -> None:
    _, url = page
    tool = made_tool(url)
    try:
        state = await tool.create(task("/demo/curves"))
        await state.page.close()
        with pytest.raises(ToolInfraError, match="browser"):
            await tool.execute(state, {"action": "look"})
        await tool.release(state)
    finally:
        await tool.close()


async def test_without_a_token_the_variable_is_named(page: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_SCREEN_TOKEN", raising=False)
    tool = made_tool(page[1])
    try:
        with pytest.raises(ToolInfraError, match="PENSTOCK_SCREEN_TOKEN"):
            await tool.create(task("/demo/curves"))
    finally:
        await tool.close()


@pytest.mark.parametrize(("policy", "reward", "images"), [("opens", 1.0, 2), ("looks", 0.0, 1)])
async def test_where_the_page_ends_is_what_is_earned(
    page: Made, signed_in: None, tmp_path: Path, policy: str, reward: float, images: int
) -> None:
    folder, url = page
    tools = f"tools=[{{name: 'screen.py:DashboardScreen', timeout_s: 100, settings: {{url: '{url}', settle_s: 3}}}}]"
    model = save_vision_processor(tmp_path)
    given = (f"data.train={folder / 'screen.parquet'}", f"model={model}", tools, "agent.concurrency=2")
    found = await played("vision/screen.yaml", policy, *given)
    assert (found.failures, found.rewards) == ([], [reward] * 4)
    for trajectory in found.trajectories:
        assert [len(of_one) for of_one in trajectory.images.by_segment] == [images]


async def screenshot(tool: Any, state: Any, unlike: Any = None, **action: Any) -> Any:
    """Repeated until the page has drawn what it loads: two in a row are alike, and not `unlike`."""
    from PIL import Image

    deadline, last = time.monotonic() + PATIENCE_S, b""
    while time.monotonic() < deadline:
        result = await tool.execute(state, action)
        assert not result.is_error, result.text
        (url,) = result.images
        if url == last:
            drawn = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB")
            if unlike is None or drawn.tobytes() != unlike.tobytes():
                return drawn
        last, action = url, {"action": "look"}
    pytest.fail(f"the page did not come to rest within {PATIENCE_S} s")
