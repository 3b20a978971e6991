"""A rollout server's line to the ledger: every call has a deadline, the last failure is remembered and shown."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Protocol, TypeVar

from penstock.transfer_queue.ledger import Announcement, LedgerError, ServerInfo, Status, WeightUpdate

LEDGER_S = 5.0
T = TypeVar("T")


class ServerLedger(Protocol):
    """The part of the ledger that a rollout server uses."""

    async def latest_version(self) -> Announcement | None: ...
    async def heartbeat(self, server: ServerInfo) -> None: ...
    async def deregister(self, server_id: str) -> None: ...
    async def report_update(self, update: WeightUpdate) -> None: ...
    async def servers(self) -> list[ServerInfo]: ...
    async def status(self) -> Status: ...


class LedgerLine:
    """``await line.ask(line.ledger.latest_version())``."""

    def __init__(self, ledger: ServerLedger) -> None:
        self.ledger = ledger
        self.error: str | None = None
        """Of the last call; None where it was answered."""

    async def ask(self, call: Awaitable[T]) -> T:
        """The answer to `call` within `LEDGER_S`. Raises `LedgerError`."""
        try:
            async with asyncio.timeout(LEDGER_S):
                answer = await call
        except TimeoutError as error:
            self.error = f"no answer in {LEDGER_S:g} s"
            raise LedgerError(self.error) from error
        except LedgerError as error:
            self.error = str(error)
            raise
        self.error = None
        return answer
