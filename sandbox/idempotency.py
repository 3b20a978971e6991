"""Idempotency keys: a request that is sent twice is carried out once.

    with as_call("9f3c…/python.0"):            # the same name in the worker that takes the episode over
        await session.run_python("x += 1")     # sent with the key of (call, request, how often it was sent)

Requests outside of a call carry no key: sent twice, they are carried out twice.

The server keeps the results by key:

    first request ──► work in its own task ──► result, kept     (the client may die meanwhile)
    second request ──────────┴── waits ─────────────────┘
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from penstock.sandbox.protocol import RunResult, SandboxError

HEADER = "Idempotency-Key"


@dataclass(slots=True)
class NamedCall:
    name: str
    counts: dict[bytes, int] = field(default_factory=dict)
    """Digest of a request → how often it was asked."""


_CALL: ContextVar[NamedCall | None] = ContextVar("call of a tool", default=None)


@contextlib.contextmanager
def as_call(name: str) -> Iterator[None]:
    """Requests made inside belong to the call `name`, which must name one call and no other, ever."""
    token = _CALL.set(NamedCall(name))
    try:
        yield
    finally:
        _CALL.reset(token)


def current_call() -> str | None:
    """Name of the call that is under way: an idempotency key for services that a tool of yours asks itself."""
    call = _CALL.get()
    return call.name if call is not None else None


def request_key(*parts: bytes) -> str | None:
    """The key of one request; None outside of a call.

    Made of what is asked, not of the order of asking: requests that a tool sends side by side find their own answers.
    """
    call = _CALL.get()
    if call is None:
        return None
    digest = hashlib.blake2b(digest_size=16)
    for part in (call.name.encode(), *parts):
        digest.update(len(part).to_bytes(8, "little") + part)
    times = call.counts[digest.digest()] = call.counts.get(digest.digest(), 0) + 1
    return f"{digest.hexdigest()}-{times}"


KEPT_BYTES = 4 << 20
"""Limit of the stored answers of one session; the newest one is stored whatever its size."""
T = TypeVar("T")


class IdempotencyCache(Generic[T]):
    """Results by key: one cache per session, and one for the starts of sessions."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._tasks: dict[str, asyncio.Future[T] | None] = {}
        """None: done, its answer is kept no longer. In the order of asking."""
        self._sizes: dict[str, int] = {}

    async def once(self, key: str | None, work: Callable[[], Awaitable[T]]) -> T:
        """Runs `work` once for each key; without a key always, in the caller's task.

        Failures of the sandbox are not kept: a repeated key tries again. An `OSError` is a result.
        Raises what `work` raised, and `SandboxError` where the answer of `key` is kept no longer.
        """
        if key is None:
            return await work()
        if key not in self._tasks:
            self._tasks[key] = task = asyncio.ensure_future(work())
            task.add_done_callback(partial(self._ended, key))
        stored = self._tasks[key]
        if stored is None:
            raise SandboxError("this call was done already, and its answer is kept no longer: it is not done twice")
        return await asyncio.shield(stored)

    def forget(self, key: str) -> None:
        """Drops the result: a repeated key is carried out again."""
        self._tasks.pop(key, None)
        self._sizes.pop(key, None)

    def _ended(self, key: str, task: asyncio.Future[T]) -> None:
        if task.cancelled() or not isinstance(task.exception(), OSError | None):
            self.forget(key)
            return
        self._sizes[key] = size_of(task.result()) if task.exception() is None else 0
        while sum(self._sizes.values()) > self._kept_bytes and len(self._sizes) > 1:
            oldest = next(iter(self._sizes))
            del self._sizes[oldest]
            self._tasks[oldest] = None


def size_of(answer: object) -> int:
    """Bytes of an answer's text or data, roughly."""
    if isinstance(answer, RunResult):
        return len(answer.stdout) + len(answer.stderr)
    return len(answer) if isinstance(answer, bytes) else 0
