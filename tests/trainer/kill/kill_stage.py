"""Runs of a real trainer on a real Redis, killed in gaps, and what must be true of each when it has ended.

nursery ──forks──► trainer (tiny model) ──► redis-server ◄── worker: completes episodes in the order of the stream
                      │ SIGKILL in a gap
                      └─ the next life goes on, until one ends by itself
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from trainer_support import assert_books_balance, make_job, make_trajectory
from trainer_support import newest as newest_checkpoint

import penstock
from penstock.trainer.state.checkpoint import CheckpointStore
from penstock.transfer_queue import Archive, RedisServer, RedisTransferQueue, TransferQueueConfig
from penstock.weight_sync import Manifest, read_verified

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PATHS = (
    Path(penstock.__file__).resolve().parents[1],
    HERE,
    HERE.parent,
    HERE.parents[1] / "transfer_queue",
    HERE.parents[2],
)
PASSWORD = "a-test-password"
STEPS = 8
EPISODES_A_STEP = 8
"""Two groups of four: `make_job`'s limits."""
SETTINGS = {"steps": STEPS, "checkpoint_every": 3, "save_trajectories": 1}
LOADING_TIMEOUT_S = 240.0
"""Torch and transformers, on a machine that has much else to do."""
LIFE_TIMEOUT_S = 300.0
KILLED = -signal.SIGKILL


class Nursery:
    """The process of nursery.py. `live` runs one trainer to its end."""

    async def __aenter__(self) -> Nursery:
        path = os.pathsep.join(map(str, PATHS))
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(HERE / "nursery.py")),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        assert await self._said(LOADING_TIMEOUT_S) == "ready"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def live(self, life: Mapping[str, Any]) -> int:
        """Its exit code; negative where a signal ended it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(life).encode() + b"\n")
        return int((await self._said(LIFE_TIMEOUT_S))["code"])

    async def _said(self, timeout_s: float) -> Any:
        """The next line of its output."""
        assert self._process.stdout is not None
        async with asyncio.timeout(timeout_s):
            line = await self._process.stdout.readline()
        assert line, "the nursery ended"
        return json.loads(line)


@dataclass
class KilledRun:
    """One run of `STEPS` steps. `play` kills its trainer in each gap that it still comes to."""

    folder: Path
    model: str
    server: RedisServer
    name: str
    settings: Mapping[str, Any] = field(default_factory=lambda: SETTINGS)

    @property
    def root(self) -> Path:
        return self.folder / "run"

    async def play(self, nursery: Nursery, gaps: Sequence[tuple[str, int]], seed: int) -> list[str]:
        """One life per (gap, passes), then one to the end. Returns the gaps that killed; a life that came to the end
        before its gap ends the run, and with it the list."""
        killed: list[str] = []
        async with self.worker():
            for number, (gap, passes) in enumerate([*gaps, ("", 1)]):
                if await self.live(nursery, gap, passes, seed + number) == 0:
                    return killed
                killed.append(gap)
        raise AssertionError(f"{self.name}: a life without a gap did not end by itself")

    async def check(
        self, reference: Mapping[str, torch.Tensor] | None = None, *, atol: float = 0.0
    ) -> dict[str, torch.Tensor]:
        """Every trajectory is in exactly one committed step, and the weights are the reference's: to the bit, or within
        `atol`."""
        queue = await self.queue()
        try:
            status, newest = await queue.status(), await queue.latest_version()
            assert_books_balance(status, self.root, STEPS)
            assert await queue.held() == set()
            await queue.drop_run()
        finally:
            await queue.close()
        weights = load_file(self.root / "final_model" / "model.safetensors")
        assert newest is not None
        assert_same(read_verified(Manifest.parse(newest.manifest)), weights, "published")
        assert_same(weights, reference or weights, "the uninterrupted run's", atol)
        self.check_archive()
        checkpoints = CheckpointStore(self.root / "checkpoints", keep=2)
        assert newest_checkpoint(checkpoints).step == STEPS
        assert not list(checkpoints.folder.glob("*.damaged"))
        return weights

    def check_archive(self) -> None:
        """The index has the episodes of every step that trained on them, once, as they were completed."""
        archive = Archive(self.root / "archive")
        assert [fault for fault in archive.verify() if "never finished" not in fault] == []
        steps = [json.loads(line) for line in (self.root / "steps.jsonl").read_text().splitlines()]
        archived = archive.index().select(["step", "episode"]).to_pylist()
        assert [(row["step"], row["episode"]) for row in archived] == [
            (line["step"], episode) for line in steps for episode in line["episodes"]
        ]

    async def live(self, nursery: Nursery, gap: str = "", passes: int = 1, seed: int = 0) -> int:
        """One trainer, to its gap or to the end: `KILLED` or 0. A worker must be there."""
        told: dict[str, Any] = {
            "folder": str(self.folder),
            "model": self.model,
            "url": self.server.url,
            "run": self.name,
        }
        told |= {"password": PASSWORD, "settings": self.settings, "gap": gap, "passes": passes, "seed": seed}
        code = await nursery.live(told)
        assert code in (0, KILLED), f"{self.name}, {gap or 'no gap'}: ended with {code}:\n{self.log()[-4000:]}"
        return code

    def worker(self, pause_s: float = 0.0) -> Worker:
        return Worker(self, pause_s)

    async def queue(self) -> RedisTransferQueue:
        return await RedisTransferQueue.connect(self.server.url, self.name, TransferQueueConfig(), PASSWORD)

    async def create(self, queue: RedisTransferQueue) -> None:
        await queue.create_run(make_job(self.folder, self.model).limits, "kills: 1")

    def log(self) -> str:
        return (self.folder / "trainer.log").read_text(errors="replace")


class Worker:
    """Completes one episode after the other, in the order of the data stream: a step has the same groups in all runs.

    `pause_s` before each.
    """

    def __init__(self, run: KilledRun, pause_s: float) -> None:
        self._run = run
        self._pause_s = pause_s
        self._completed = 0
        self.steps = STEPS
        """Steps whose episodes it completes. While it is less than the run's steps, the run cannot end."""

    async def __aenter__(self) -> Worker:
        self._queue = await self._run.queue()
        await self._run.create(self._queue)
        self._task = asyncio.create_task(self._work())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        (ended,) = await asyncio.gather(self._task, return_exceptions=True)
        await self._queue.close()
        assert isinstance(ended, asyncio.CancelledError), ended

    async def _work(self) -> None:
        while True:
            if self._completed >= self.steps * EPISODES_A_STEP:
                await asyncio.sleep(0.005)
                continue
            version = (await self._queue.status()).version
            leases = await self._queue.lease_episodes("w", 1, version)
            for lease in leases:
                await asyncio.sleep(self._pause_s)
                made = make_trajectory(lease.task.task_id, lease.member, version)
                await self._queue.complete(lease, made)
                self._completed += 1
            if not leases:
                await asyncio.sleep(0.005)


@dataclass
class Tally:
    """Of all runs of a test."""

    kills: Counter[str] = field(default_factory=Counter)
    runs: int = 0

    def __str__(self) -> str:
        return f"{sum(self.kills.values())} kills in {self.runs} runs: {json.dumps(dict(sorted(self.kills.items())))}"


def assert_same(
    tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], whose: str, atol: float = 0.0
) -> None:
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert torch.allclose(tensor, expected[name], rtol=0, atol=atol), f"{name} is not {whose}"


def drawn(gaps: Sequence[str], chance: random.Random) -> list[tuple[str, int]]:
    """Each with the pass at which it kills."""
    often = {"lease", "update", "publish", "weights", "record"}
    return [(gap, chance.randint(1, 3 if gap.partition("_")[2] in often else 1)) for gap in gaps]
