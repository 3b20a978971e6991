"""Answers by idempotency key: who asks again gets the first one's answer, also while that is still being worked out.

asked first ──► work in a task of its own ──► answer, kept     (the asker may die meanwhile)
asked again ─────────────┴── waits ───────────────┘
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Generic, TypeVar

from penstock.sandbox.protocol import RunResult, SandboxError

KEPT_BYTES = 4 << 20
"""Of the answers of one session; the newest one is kept whatever its size."""
T = TypeVar("T")


class Recorded(Generic[T]):
    """One per session, and one for the starts of sessions; lives as long as what was done does."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._tasks: dict[str, asyncio.Task[T] | None] = {}
        """None: done, its answer is kept no longer. In the order of asking."""
        self._sizes: dict[str, int] = {}

    async def once(self, key: str | None, work: Callable[[], Awaitable[T]]) -> T:
        """`work()`, for each key once; without a key always, and within the asker's own task.

        A failure of the sandbox is not kept: who asks again tries again. An `OSError` is an answer.
        Raises what `work` raised, and `SandboxError` where the answer of `key` is kept no longer.
        """
        if key is None:
            return await work()
        if key not in self._tasks:
            self._tasks[key] = task = asyncio.ensure_future(_awaited(work))
            task.add_done_callback(partial(self._ended, key))
        running = self._tasks[key]
        if running is None:
            raise SandboxError("this call was done already, and its answer is kept no longer: it is not done twice")
        return await asyncio.shield(running)

    def forget(self, key: str) -> None:
        """What was done is gone: who asks again has it done again."""
        self._tasks.pop(key, None)
        self._sizes.pop(key, None)

    def _ended(self, key: str, task: asyncio.Task[T]) -> None:
        if task.cancelled() or not isinstance(task.exception(), OSError | None):
            self.forget(key)
            return
        self._sizes[key] = size_of(task.result()) if task.exception() is None else 0
        while sum(self._sizes.values()) > self._kept_bytes and len(self._sizes) > 1:
            oldest = next(iter(self._sizes))
            del self._sizes[oldest]
            self._tasks[oldest] = None


async def _awaited(work: Callable[[], Awaitable[T]]) -> T:
    return await work()


def size_of(answer: object) -> int:
    """Bytes of an answer's text or data, roughly."""
    if isinstance(answer, RunResult):
        return len(answer.stdout) + len(answer.stderr)
    return len(answer) if isinstance(answer, bytes) else 0
