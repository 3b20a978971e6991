"""Usage of an agent worker by episode, for the queue's ledger: the time of sandbox boxes, and calls of judges."""

from __future__ import annotations

import time
from contextlib import AbstractAsyncContextManager
from functools import wraps
from typing import Any, cast

from penstock.agent_loops.tracing import current_episode
from penstock.sandbox import Sandbox
from penstock.transfer_queue import TransferQueue, UsageMeter

OPENS, ENDS = frozenset({"start", "attach", "fork"}), frozenset({"close", "leave"})
"""Verbs of a sandbox that return a session, and of a session that give its box up."""


class WorkerUsage:
    """Open boxes of one worker, and what else its episodes use. A box is its episode's until it is closed, or left to
    another worker."""

    def __init__(self, worker: str) -> None:
        self._meter = UsageMeter(worker, self._count_open)
        self._open: dict[int, tuple[str, float]] = {}
        """Session → its episode, and until when it is counted."""

    def add(self, episode: str, resource: str, amount: float) -> None:
        self._meter.add(episode, resource, amount)

    def opened(self, session: object) -> None:
        self._open[id(session)] = (current_episode(), time.monotonic())

    def ended(self, session: object) -> None:
        self._count(id(session))
        self._open.pop(id(session), None)

    def reported(self, queue: TransferQueue) -> AbstractAsyncContextManager[None]:
        """Report to the queue's ledger in the block, and at its end."""
        return self._meter.reported(queue.report_usage)

    async def report(self, queue: TransferQueue) -> None:
        """Report up to now; what the queue does not take is kept."""
        await self._meter.report(queue.report_usage)

    def _count_open(self) -> None:
        for session in self._open:
            self._count(session)

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
