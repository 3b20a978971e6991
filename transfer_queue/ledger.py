"""The ledger: usage of processes by episode, and the fates of episodes. Accounts of cost are made of both.

    rollout server, agent worker ── UsageReport, each second ──┐
    queue: trained, filtered, over age, given up … ── fates ───┴──► ledger ──► the head's accounts, which trim it

A report names episodes, not accounts: tokens are sampled before anybody knows whether they will be trained on.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from penstock.common import cancel_and_wait
from penstock.transfer_queue.errors import QueueError

logger = logging.getLogger(__name__)
LEDGER_KEPT = 8192
"""Entries that wait for a head; beyond them the oldest go."""


IDLE, SETUP, OTHERS = "idle", "start and end", "others"
"""Names in a report's amounts that are no episodes: devices without a request or a batch, devices of a process that
starts or saves, and requests of no episode."""
ENDED, KILLED = "ended", "killed"
"""Names in the report of a head on a process that has ended: all that the process used, reported or not."""
REPORT_EVERY_S = 0.5
"""A process that is killed takes along what it has not reported."""
STEP = "step/"
"""Prefix of the name of a step that the trainer has trained."""


class Fate(StrEnum):
    """The end of an episode of split ``train``."""

    TRAINED = "trained"
    FILTERED = "filtered"
    """The group had equal rewards."""
    OVER_AGE = "over age"
    """The group was dropped: it was over `max_staleness`."""
    UNREWARDED = "unrewarded"
    DEAD_LETTER = "dead letter"
    """The episode was given up, or too few members of its group were left."""
    PAYLOAD_LOST = "payload lost"


@dataclass(frozen=True, slots=True)
class UsageReport:
    """Usage of a process since its last report."""

    report_id: str
    """A report of the same id counts once."""
    process: str
    """The name of a server, worker or rank; after a space, which life of it."""
    amounts: Mapping[str, Mapping[str, float]]
    """Episode or step → resource → amount; what is for neither is under `IDLE`, `SETUP` or `OTHERS`. Resources are
    ``tokens``, ``rollout_s``, ``trainer_s``, ``box_s`` and ``judged_calls``."""


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """A report, or the fate of some episodes."""

    number: int
    """Grows with every entry of the run."""
    usage: UsageReport | None = None
    fate: Fate | None = None
    episodes: Sequence[tuple[str, int]] = field(default=())
    """(episode, sampled tokens of its trajectory; 0 where it has none), of a fate."""


Send = Callable[[UsageReport], Awaitable[None]]


class UsageMeter:
    """Usage of a process that the queue has not taken yet. It is reported every `REPORT_EVERY_S`."""

    def __init__(self, process: str, count: Callable[[], None]) -> None:
        """`count` adds what was used since its last call."""
        self._process, self._count = process, count
        self._amounts = defaultdict[str, defaultdict[str, float]](lambda: defaultdict(float))
        self._unsent: UsageReport | None = None
        self._reporting = asyncio.Lock()
        """A last report may come while a regular one is under way."""

    def add(self, name: str, resource: str, amount: float) -> None:
        """`name`: see `UsageReport.amounts`; an empty one is a request of somebody else."""
        self._amounts[name or OTHERS][resource] += amount

    @asynccontextmanager
    async def reported(self, send: Send) -> AsyncIterator[None]:
        """Reports go out in the block, and a last one at its end."""
        keeper = asyncio.create_task(self.keep(send), name="usage")
        try:
            yield
        finally:
            await cancel_and_wait([keeper])
            await self.report(send)

    async def keep(self, send: Send) -> None:
        """Reports until cancelled."""
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            await self.report(send)

    async def report(self, send: Send) -> None:
        """Report what was used up to now. If `send` raises `QueueError`, the next call sends the same report first:
        nothing counts twice."""
        self._count()
        try:
            async with self._reporting:
                await self._send_unsent(send)
                if self._amounts:
                    amounts = {name: dict(each) for name, each in self._amounts.items()}
                    self._amounts.clear()
                    self._unsent = UsageReport(secrets.token_hex(8), self._process, amounts)
                    await self._send_unsent(send)
        except QueueError as error:
            logger.warning("usage is not reported yet: %s", error)

    async def _send_unsent(self, send: Send) -> None:
        if self._unsent is not None:
            await send(self._unsent)
            self._unsent = None
