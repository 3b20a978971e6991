"""A page without a socket, over a folder of runs and a queue in memory; and one in a process, with a Chromium."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from tests.dashboard.browser import Tab, chromium, page_process
from tests.dashboard.recorded import WRITES

from penstock.dashboard import Tokens, make_app
from penstock.testing import MemoryTransferQueue
from penstock.transfer_queue import TransferQueue


class GivenQueues:
    """See `LiveQueues`."""

    def __init__(self) -> None:
        self.queues: dict[str, TransferQueue] = {}
        self.closed = False

    def names(self) -> Sequence[str]:
        return list(self.queues)

    async def queue(self, run: str) -> TransferQueue | None:
        return self.queues.get(run)

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def queues() -> GivenQueues:
    return GivenQueues()


@pytest.fixture
async def queue(queues: GivenQueues) -> MemoryTransferQueue:
    """Of the living run `mine`."""
    queues.queues["mine"] = made = MemoryTransferQueue()
    return made


@pytest.fixture
async def page(tmp_path: Path, queues: GivenQueues) -> AsyncIterator[httpx.AsyncClient]:
    """Signed in with the token that may write."""
    app = make_app(tmp_path, queues, Tokens("writes", "looks"))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=WRITES) as client:
        yield client


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page") / "runs"


@pytest.fixture(scope="module")
def url(runs_dir: Path) -> Iterator[str]:
    """Of `penstock dashboard` over `runs_dir`."""
    with page_process(runs_dir) as address:
        yield address


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser() -> AsyncIterator[Any]:
    async with chromium() as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def open_tab(browser: Any, url: str) -> AsyncIterator[Callable[..., Any]]:
    """Opens tabs, each with a memory of its own; fails where anything in one of them went wrong."""
    contexts, tabs = [], []

    async def open_(width: int = 1200, height: int = 800) -> Tab:
        contexts.append(await browser.new_context(viewport={"width": width, "height": height}))
        tabs.append(Tab(await contexts[-1].new_page(), url))
        return tabs[-1]

    yield open_
    for context in contexts:
        await context.close()
    assert [trouble for tab in tabs for trouble in tab.trouble] == []
