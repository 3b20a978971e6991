"""CPU time of a run's rollout servers and trainers by the kernel, whatever is killed, to compare accounts with."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Self

import psutil

from benchmarks.support.soak_run import SoakRun

LOOK_S = 0.05
FAMILY_S = 1.0
"""Time between two looks for new processes."""
ROLES = ("rollout", "trainer")


class DeviceCpu:
    """Reads the processes' times until the block ends; one that was killed counts with what was read last."""

    def __init__(self, run: SoakRun) -> None:
        self._run = run
        self._seconds: dict[tuple[int, float], float] = {}
        self._processes: dict[tuple[int, float], psutil.Process] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="CPU time of devices", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def seconds(self) -> float:
        return sum(self._seconds.values())

    def _watch(self) -> None:
        looked = 0.0
        while not self._ended.wait(LOOK_S):
            if time.monotonic() - looked > FAMILY_S:
                looked = time.monotonic()
                with contextlib.suppress(psutil.Error):
                    self._processes |= {(one.pid, one.create_time()): one for one in self._family()}
            for name, process in [*self._processes.items()]:
                try:
                    times = process.cpu_times()
                    self._seconds[name] = times.user + times.system
                except psutil.Error:  # it has ended; one whose supervisor was killed ends after it
                    del self._processes[name]

    def _family(self) -> Iterator[psutil.Process]:
        for role, process in self._run.parts():
            if role in ROLES:
                yield process
                with contextlib.suppress(psutil.NoSuchProcess):
                    yield from process.children(recursive=True)
