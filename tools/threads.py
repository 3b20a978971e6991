"""Threads for plain (not async) code of users, which must not stop the worker's other episodes.

A thread cannot be killed. A call that outlives its deadline is left behind, and its place is free for the next one:
calls that never return cost a thread each, and the rest continue. Too many of them are an error that names them.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from typing import Any

from anyio import CapacityLimiter, to_thread


class TooManyAbandonedCalls(RuntimeError):
    """Too many plain calls never returned: no further one is started."""


class UserThreads:
    """At most `at_once` calls with a waiting caller, and `left_behind_most` abandoned ones."""

    def __init__(self, at_once: int = 64, left_behind_most: int = 256) -> None:
        self._limiter = CapacityLimiter(at_once)
        self._left_behind_most = left_behind_most
        self._left_behind: set[ThreadCall] = set()

    async def run(self, function: Callable[[], Any], name: str) -> Any:
        """Return what `function` returns, or raise what it raises. Cancelled, it runs on in its thread. Raises
        `TooManyAbandonedCalls`.
        """
        self._left_behind = {call for call in self._left_behind if call.running}
        if len(self._left_behind) >= self._left_behind_most:
            names = ", ".join(sorted({call.name for call in self._left_behind}))
            raise TooManyAbandonedCalls(
                f"{len(self._left_behind)} calls never returned ({names}): give what they wait for a timeout,"
                " or write them async so that they can be cancelled"
            )
        call = ThreadCall(function, name)
        try:
            return await to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._limiter)
        except asyncio.CancelledError:
            self._left_behind.add(call)
            raise


class ThreadCall:
    def __init__(self, function: Callable[[], Any], name: str) -> None:
        self._function = function
        self.name = name
        self.running = False

    def __call__(self) -> Any:
        self.running = True
        try:
            return self._function()
        finally:
            self.running = False


_THREADS = UserThreads()


async def call_users(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(…)`: awaited if it is async, in a thread if it is plain. Context variables are the caller's."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    name = getattr(function, "__qualname__", repr(function))
    value = await _THREADS.run(functools.partial(function, *args, **kwargs), name)
    return await value if inspect.isawaitable(value) else value
