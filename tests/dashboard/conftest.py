"""A page without a socket, over a folder of runs and a ledger in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
import pytest
from tests.dashboard.recorded import WRITES

from penstock.dashboard.access import Tokens
from penstock.dashboard.app import make_app
from penstock.transfer_queue.ledger import Ledger
from penstock.transfer_queue.memory import MemoryLedger


class GivenLedgers:
    """See `LiveLedgers`."""

    def __init__(self) -> None:
        self.ledgers: dict[str, Ledger] = {}
        self.closed = False

    def names(self) -> Sequence[str]:
        return list(self.ledgers)

    async def ledger(self, run: str) -> Ledger | None:
        return self.ledgers.get(run)

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def ledgers() -> GivenLedgers:
    return GivenLedgers()


@pytest.fixture
async def ledger(ledgers: GivenLedgers) -> MemoryLedger:
    """Of the living run `mine`."""
    ledgers.ledgers["mine"] = made = MemoryLedger()
    return made


@pytest.fixture
async def page(tmp_path: Path, ledgers: GivenLedgers) -> AsyncIterator[httpx.AsyncClient]:
    """Signed in with the token that may write."""
    app = make_app(tmp_path, ledgers, Tokens("writes", "looks"))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=WRITES) as client:
        yield client
