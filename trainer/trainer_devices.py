"""The trainer's part in the turns on devices that it shares with rollout engines.

    start   take ─► load the model (no other process loads onto its GPUs) ─► restore, publish ─► needs claimed ─► leave
    step    batch is there ─► take ─► enter ─► score, update, copy weights and checkpoint ─► version is out ─► leave

Rank 0 has the turn for all ranks; they enter and leave their devices together. The engines begin their turn with the
new version announced. A trainer that fails in its turn keeps it until its process has ended: its memory is there until
then.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from penstock.common import load_on_devices, process_identity, visible_devices
from penstock.common.device_locks import DEVICE_WAIT_S
from penstock.trainer.engine import Engine, SharingEngine
from penstock.trainer.job import BadJob, TrainJob
from penstock.trainer.publish import Publisher
from penstock.trainer.ranks.distributed import Ranks, TorchThread
from penstock.trainer.timeline import Timeline, Track
from penstock.transfer_queue import ALL_THAT_IS_FREE, DeviceTurn


class TrainerDevices:
    """Every rank has one. Without `TrainJob.turn` the devices are the trainer's, and only `loading` does something."""

    def __init__(self, job: TrainJob, ranks: Ranks, in_torch: TorchThread, timeline: Timeline) -> None:
        self._ranks, self._in_torch, self._timeline = ranks, in_torch, timeline
        self._queue, self._collective_s = job.run.queue, job.config.collective_timeout_s
        self._shares = job.turn is not None
        self._turn: DeviceTurn | None = None
        if job.turn is not None and ranks.is_rank0:
            life = f"{process_identity()}-{secrets.token_hex(4)}"
            self._turn = DeviceTurn(job.run.queue, "trainer", f"trainer, process {os.getpid()} ({life})", job.turn)
        self._engine: SharingEngine | None = None
        self._needs = ALL_THAT_IS_FREE
        self.last_wait_s = 0.0
        """Seconds of waiting for the last turn."""
        self._inside = False

    @asynccontextmanager
    async def renewal(self) -> AsyncGenerator[None]:
        """The turn is renewed until the end of the block, for which it is held at first. Raises `TurnTimeout`."""
        if self._turn is None:
            await self._take()
            yield
            return
        async with self._turn.renewal():
            await self._take()
            yield

    @asynccontextmanager
    async def loading(self) -> AsyncGenerator[None]:
        """No other process loads onto this machine's GPUs of the trainer in the block. Raises `DeviceBusy`."""
        first = self._ranks.device.type == "cuda" and os.environ.get("LOCAL_RANK", "0") == "0"
        devices = visible_devices() if first else ()
        # One process has all of them, in the order of an engine that is split over several; the other ranks wait for it
        # in a collective, which must not end before its deadline.
        wait_s = min(DEVICE_WAIT_S, self._collective_s / 2)
        async with load_on_devices("the trainer", devices, wait_s):
            await self._in_torch(self._ranks.meet)
            yield

    def check(self) -> None:
        """Raises `TurnLost`."""
        if self._turn is not None:
            self._turn.check()

    async def started(self, engine: Engine) -> None:
        """The model is loaded. Raises `BadJob`, `OverBudget`, `TurnLost`."""
        if not self._shares:
            return
        if not isinstance(engine, SharingEngine):
            raise BadJob("placement: turns need trainer.engine=fsdp: no other one moves its states to the host")
        self._engine = engine
        self._needs = int(await self._in_torch(self._ranks.sum, engine.turn_bytes))
        if self._turn is not None:
            # A rank reports for all of them: they have equal parts.
            self._turn.used = lambda: engine.used_bytes * self._ranks.world
            await self._turn.claim(self._needs)

    async def leave(self, publisher: Publisher) -> None:
        """The engines' turn begins when this returns. Raises `TurnLost`, `OverBudget`, `TurnTimeout`."""
        if self._engine is None or not self._inside:
            return
        await publisher.settle()
        self.check()
        if self._turn is not None:
            await self._turn.claim(self._needs)  # said while everything is there: a step may be shorter than a renewal
        await self._in_torch(self._engine.leave_device)
        self._needs = int(await self._in_torch(self._ranks.sum, self._engine.turn_bytes))
        self._inside = False
        if self._turn is not None:
            await self._turn.give_back(self._turn.used())

    @asynccontextmanager
    async def held(self, publisher: Publisher, step: int) -> AsyncGenerator[None]:
        """The devices are the trainer's in the block. Raises `TurnTimeout`, `TurnLost`, `OverBudget`."""
        if self._engine is None:
            yield
            return
        with self._timeline.during(Track.STEPS, "turn", step):
            await self._take()
            await self._in_torch(self._engine.enter_device)
        yield
        with self._timeline.during(Track.STEPS, "leave", step):
            await self.leave(publisher)

    async def _take(self) -> None:
        if not self._shares:
            return
        began = time.monotonic()
        if self._turn is not None:
            await self._turn.take(self._needs)
            await self._queue.add_wait("trainer", "turn", time.monotonic() - began)
        await self._in_torch(self._ranks.meet)
        self._inside, self.last_wait_s = True, time.monotonic() - began
