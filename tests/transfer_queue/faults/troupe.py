"""Keeps a stage's workers and its trainer alive: one that was killed is replaced, one that fails ends the stage.

per worker place:  start ─► wait ─► killed by us? start the next
trainer:           start with the next gap ─► wait ─► killed, or told to start again? the next life
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from faults.gaps import ANYWHERE
from faults.processes import KILLED, Process
from faults.trainer import START_AGAIN

MOST_PASSES = {"in_checkpoint": 2, "after_checkpoint": 2, "in_commit": 2, "after_commit": 2}
STOP_TIMEOUT_S = 30.0
STOPPED_EARLY = -signal.SIGTERM
"""It was asked to stop before it had begun."""
MOST_STARTS = 30
"""A trainer that was told to start again so often, without a life that trains, will never go on."""


class Troupe:
    """The processes of one stage. `kills` counts what was killed: ``worker``, and ``trainer:GAP``."""

    def __init__(self, plan_file: Path, chance: random.Random, options: Sequence[str]) -> None:
        self._plan_file = plan_file
        self._chance = chance
        self._options = options
        self._workers: dict[int, Process] = {}
        self._trainer: Process | None = None
        self._stopping = False
        self._lives = 0
        self.kills: Counter[str] = Counter()
        self.restarts: Counter[str] = Counter()
        """``worker`` | ``trainer`` → how often one was started again."""

    async def keep_worker(self, place: int, *options: str) -> None:
        """Until `stop_workers`. Raises `ProcessFailed` where one ends by itself."""
        number = 0
        while not self._stopping:
            name = f"worker-{place}-{number}"
            process = await Process.start("worker", self._plan_file, name, *self._options, *options)
            self._workers[place] = process
            if self._stopping:
                process.signal(signal.SIGTERM)
            code = await process.wait()
            if code not in ((0, STOPPED_EARLY, KILLED) if self._stopping else (KILLED,)):
                raise process.failure(code)
            number += 1
        self.restarts["worker"] += number - 1

    def kill_worker(self) -> None:
        if self._workers[self._chance.choice([*self._workers])].signal(signal.SIGKILL):
            self.kills["worker"] += 1

    async def stop_workers(self) -> None:
        """Ask them to hand back what they hold."""
        self._stopping = True
        for process in self._workers.values():
            process.signal(signal.SIGTERM)
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await asyncio.gather(*(process.wait() for process in self._workers.values()))

    async def kill_trainer_in(self, gaps: Sequence[str], *, most_passes: int = 4) -> None:
        """One life for each gap, one after the other, each ending there."""
        for gap in gaps:
            passes = self._chance.randint(1, MOST_PASSES.get(gap, most_passes))
            await self._until(KILLED, gap, passes)
            self.kills[f"trainer:{gap}"] += 1

    async def finish_training(self) -> None:
        """Until a life says that everything is trained."""
        await self._until(0, "", 1)

    async def _until(self, code: int, gap: str, passes: int) -> None:
        """Lives that are told to start again are no end."""
        for _ in range(MOST_STARTS):
            if await self._trainer_life(gap, passes) == code:
                return
        raise self._trainer.failure(START_AGAIN)

    async def _trainer_life(self, gap: str, passes: int) -> int:
        self._lives += 1
        self.restarts["trainer"] += self._lives > 1
        inside = ["--gap", gap, "--passes", str(passes)] if gap not in ("", ANYWHERE) else []
        process = await Process.start("trainer", self._plan_file, f"trainer-{self._lives}", *self._options, *inside)
        self._trainer = process
        if gap == ANYWHERE:
            await asyncio.sleep(self._chance.uniform(0.35, 1.5))
            process.signal(signal.SIGKILL)
        code = await process.wait()
        if code not in (START_AGAIN, KILLED if gap else 0):
            raise process.failure(code)
        return code

    async def end(self) -> None:
        """Nobody is left."""
        everyone = [*self._workers.values(), *([self._trainer] if self._trainer else [])]
        await asyncio.gather(*(process.end() for process in everyone))
