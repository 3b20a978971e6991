"""Usage of an agent worker by episode, for the queue's ledger: the time of sandbox boxes, and calls of judges."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any, cast

from penstock.agent_loops.tracing import current_episode
from penstock.common import cancel_and_wait
from penstock.sandbox import Sandbox
from penstock.transfer_queue import REPORT_EVERY_S, QueueError, TransferQueue, UsageMeter

OPENS, ENDS = frozenset({"start", "attach", "fork"}), frozenset({"close", "leave"})
"""Verbs of a sandbox that return a session, and of a session that give its box up."""


log = logging.getLogger(__name__)


class WorkerUsage:
    """Open boxes of one worker, and what else its episodes use. A box is its episode's until it is closed, or left to
    another worker."""

    def __init__(self, worker: str) -> None:
        self._meter = UsageMeter(worker)
        self._open: dict[int, tuple[str, float]] = {}
        """Session → its episode, and until when it is counted."""

    def add(self, episode: str, resource: str, amount: float) -> None:
        self._meter.add(episode, resource, amount)

    def opened(self, session: object) -> None:
        self._open[id(session)] = (current_episode(), time.monotonic())

    def ended(self, session: object) -> None:
        self._count(id(session))
        self._open.pop(id(session), None)

    @asynccontextmanager
    async def reported(self, queue: TransferQueue) -> AsyncIterator[None]:
        """Report to the queue's ledger every `REPORT_EVERY_S` in the block, and at its end."""
        keeper = asyncio.create_task(self._keep(queue), name="usage of boxes")
        try:
            yield
        finally:
            await cancel_and_wait([keeper])
            await self.report(queue)

    async def _keep(self, queue: TransferQueue) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            await self.report(queue)

    async def report(self, queue: TransferQueue) -> None:
        """Report the boxes that are open up to now; what the queue does not take is kept."""
        for session in self._open:
            self._count(session)
        try:
            await self._meter.send(queue.report_usage)
        except QueueError as error:
            log.warning("usage is not reported yet: %s", error)

    def _count(self, session: int) -> None:
        if session in self._open:
            (episode, since), now = self._open[session], time.monotonic()
            self._meter.add(episode, "box_s", now - since)
            self._open[session] = (episode, now)


def counted(sandbox: Sandbox, usage: WorkerUsage) -> Sandbox:
    """The same sandbox, whose boxes `usage` counts."""
    return cast(Sandbox, _CountedSandbox(sandbox, usage))


class _CountedSandbox:
    def __init__(self, inner: Any, usage: WorkerUsage) -> None:
        self._inner, self._usage = inner, usage

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._inner, name)
        if name == "snapshot":
            return lambda session: verb(session._inner)
        if name not in OPENS:
            return verb

        @wraps(verb)
        async def call(*args: Any, **kwargs: Any) -> Any:
            session = _CountedSession(await verb(*args, **kwargs), self._usage)
            self._usage.opened(session)
            return session

        return call


class _CountedSession:
    def __init__(self, inner: Any, usage: WorkerUsage) -> None:
        self._inner, self._usage = inner, usage

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._inner, name)
        if name not in ENDS:
            return verb

        @wraps(verb)
        async def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return await verb(*args, **kwargs)
            finally:
                self._usage.ended(self)

        return call
