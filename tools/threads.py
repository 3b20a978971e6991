"""Where plain (not async) code of users runs: one that computes or waits must not stop the worker's other episodes."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

THREADS = 64
_POOL = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="user-code")


async def call_users(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(…)`: awaited where it is async, in a thread where it is plain. Context variables are the caller's."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    work = functools.partial(contextvars.copy_context().run, function, *args, **kwargs)
    value = await asyncio.get_running_loop().run_in_executor(_POOL, work)
    return await value if inspect.isawaitable(value) else value
