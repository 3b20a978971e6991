"""Time of a block of torch work and, where it is asked for, the most memory that it held."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile


class Meter:
    """`with Meter() as meter: …`, then `meter.seconds`; with `memory` also `meter.peak_bytes`, and the time is spoilt.

    The peak is the most bytes of tensors that live at a time, above those from before: on a CPU from the profiler's
    record of every allocation of this thread, also those inside an operation; on a GPU as its allocator counts them.
    `device` is the one that the tensors are on: by default a GPU if there is one.
    """

    seconds: float = 0.0
    cpu_s: float = 0.0
    """On a core, of all threads of this process: what a busy machine disturbs less"""
    peak_bytes: int = 0

    def __init__(self, *, memory: bool = False, device: torch.device | None = None) -> None:
        self._record: Recorder | None = None
        if memory:
            on_gpu = torch.cuda.is_available() if device is None else device.type == "cuda"
            self._record = OnGpu() if on_gpu else OnHost()

    def __enter__(self) -> Meter:
        if self._record is not None:
            self._record.begin()
        synchronise()
        self._began, self._cpu_began = time.perf_counter(), time.process_time()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        synchronise()
        self.seconds = time.perf_counter() - self._began
        self.cpu_s = time.process_time() - self._cpu_began
        if self._record is not None:
            self.peak_bytes = self._record.end()


def peak_bytes(work: Callable[[], None], module: nn.Module) -> int:
    """The most bytes that `work` holds at a time; the gradients of `module` are there before."""
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    gc.collect()  # else what earlier work left in cycles may be freed meanwhile, and be counted as given back
    with Meter(memory=True, device=next(module.parameters()).device) as meter:
        work()
    return meter.peak_bytes


def synchronise() -> None:
    """What was given to a GPU is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Recorder(Protocol):
    def begin(self) -> None: ...

    def end(self) -> int:
        """Bytes"""


class OnHost:
    def __init__(self) -> None:
        self._profile: Any = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def begin(self) -> None:
        self._profile.__enter__()

    def end(self) -> int:
        self._profile.__exit__(None, None, None)
        events = [one for one in self._profile.profiler.kineto_results.events() if one.name() == "[memory]"]
        held = most = 0
        for event in sorted(events, key=lambda one: one.start_ns()):
            held += event.nbytes()
            most = max(most, held)
        return most


class OnGpu:
    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    def end(self) -> int:
        return torch.cuda.max_memory_allocated() - self._before
