"""Usage of a trainer's rank by step: the time of its devices, for the queue's ledger."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from penstock.common import DeviceClock, life_of_process, visible_devices
from penstock.transfer_queue import IDLE, SETUP, TransferQueue, UsageMeter


class RankUsage:
    """Counts for what `begin` has named last. It begins with `SETUP`."""

    def __init__(self, rank: int, queue: TransferQueue, *, shares_devices: bool) -> None:
        """`shares_devices`: while this trainer waits they are an engine's, which counts them."""
        self._meter = UsageMeter(f"trainer-{rank} {life_of_process()}", self._count)
        self._queue, self._shares_devices = queue, shares_devices
        self._clock = DeviceClock(min(1, len(visible_devices())))  # a rank sees the GPUs of all, and has one
        self._name = SETUP

    def begin(self, name: str) -> None:
        """The devices work for `name` from now on: a step, or `IDLE` or `SETUP`."""
        self._count()
        self._name = name

    def reported(self) -> AbstractAsyncContextManager[None]:
        """Reports go out in the block, and a last one at its end."""
        return self._meter.reported(self._queue.report_usage)

    def _count(self) -> None:
        elapsed_s = self._clock.elapsed_s()
        if self._name != IDLE or not self._shares_devices:
            self._meter.add(self._name, "trainer_s", elapsed_s)
