"""One thread for all torch work of a rank: the event loop stays free, and collectives keep one order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


class TorchThread:
    """`await in_torch(function, *args)` runs it in the thread; calls run one after the other, in order."""

    def __init__(self, threads: int) -> None:
        # The number of OpenMP threads belongs to the thread that sets it, hence in the initializer.
        self._pool = ThreadPoolExecutor(1, "torch", initializer=torch.set_num_threads, initargs=(threads,))

    async def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: function(*args, **kwargs))

    def close(self) -> None:
        """Calls not yet begun are dropped; one under way is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)
