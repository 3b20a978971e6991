"""One rank of two killed with -9: supervision starts all of them again, within its limit, from the last checkpoint."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from kill_stage import PASSWORD, SETTINGS, STEPS, KilledRun
from trainer_support import write_rows

from penstock.deploy import (
    RoleFailed,
    RoleProcess,
    RoleSpec,
    RunConfig,
    RunConnection,
    RunDir,
    dump_config,
    limits_of,
    parse_config,
    remove_weights,
    roles_of,
)
from penstock.transfer_queue import RedisTransferQueue

pytestmark = [
    pytest.mark.redis,
    pytest.mark.torch,
    pytest.mark.crash,
    pytest.mark.slow,
    pytest.mark.deep,
    pytest.mark.asyncio(loop_scope="session"),
]
PAUSE_S = 0.05
"""Before each episode: a step takes that eight times longer, so that a kill falls into the middle of the run."""
GLOO_ROUNDING = 2e-5
WITHIN_S = 60.0
"""A rank that is stopped is named."""


@dataclass
class RankedRun(KilledRun):
    """A run of two ranks, its trainer started as `penstock run` starts it."""

    @property
    def root(self) -> Path:
        return self.folder / self.name

    def config(self) -> RunConfig:
        trainer = {**self.settings, "ranks": 2, "lr": 1e-3, "eps": 1e-4, "max_restarts": 1}
        return parse_config(
            {
                "name": self.name,
                "runs_dir": str(self.folder),
                "model": self.model,
                "max_staleness": 1,
                "group_size": 4,
                "groups_per_step": 2,
                "data": {"train": write_rows(self.folder / "train.jsonl")},
                "rollout": {"weight_transport": "disk"},
                "transfer_queue": {"lease_ttl_s": 30.0},
                "trainer": trainer,
            },
            source="the test",
        )

    async def create(self, queue: RedisTransferQueue) -> None:
        """The trainer finds its settings in the queue."""
        config = self.config()
        await queue.create_run(limits_of(config), dump_config(config))

    def spec(self) -> RoleSpec:
        """Of the trainer."""
        config = self.config()
        run = RunDir.of(config)
        run.logs.mkdir(parents=True)
        spec = roles_of(config, RunConnection(self.server.url, self.name, PASSWORD, token="t"))[-1].spec(run.logs)
        source = str(Path(__file__).parents[3] / "src")
        return replace(spec, env={**spec.env, "PYTHONPATH": source})

    def steps(self) -> int:
        metrics = self.root / "metrics.jsonl"
        return metrics.read_text().count("\n") if metrics.exists() else 0


@asynccontextmanager
async def supervised(spec: RoleSpec) -> AsyncIterator[tuple[RoleProcess, asyncio.Task[None]]]:
    trainer = RoleProcess(spec)
    running = asyncio.create_task(trainer.run())
    try:
        yield trainer, running
    finally:
        await trainer.stop()
        await asyncio.gather(running, return_exceptions=True)


async def kill_rank(trainer: RoleProcess, rank: int, signum: signal.Signals = signal.SIGKILL) -> int:
    """The process of that rank, which got the signal."""
    assert trainer.pid is not None
    for child in psutil.Process(trainer.pid).children(recursive=True):
        if child.environ().get("RANK") == str(rank):
            os.kill(child.pid, signum)
            return child.pid
    raise AssertionError(f"no rank {rank}")


async def until(condition: Callable[[], bool], running: asyncio.Task[None], log: Path) -> None:
    async with asyncio.timeout(400):
        while not condition():
            assert not running.done(), log.read_text()[-4000:]
            await asyncio.sleep(0.02)


async def test_all_ranks_go_on_from_the_last_checkpoint_as_often_as_the_limit_says(
    tmp_path: Path, tiny_model: str, redis_server: Any, reference: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    run = RankedRun(tmp_path, tiny_model, redis_server, f"ranks-{os.getpid()}", {**SETTINGS, "save_trajectories": 0})
    request.addfinalizer(lambda: remove_weights(run.config()))  # `penstock run` does, which is not here
    spec = run.spec()
    async with run.worker(PAUSE_S) as worker:
        worker.steps = STEPS - 2
        async with supervised(spec) as (trainer, running):
            await until(lambda: run.steps() >= 4, running, spec.log)
            await kill_rank(trainer, 1)
            killed_at = time.monotonic()
            await until(lambda: trainer.restarts == 1, running, spec.log)
            noticed_s = time.monotonic() - killed_at
            before = run.steps()
            worker.steps = STEPS - 1
            await until(lambda: run.steps() > before, running, spec.log)
            print(f"noticed after {noticed_s:.1f} s, training again after {time.monotonic() - killed_at:.1f} s")
            await kill_rank(trainer, 0)
            with pytest.raises(RoleFailed, match="1 restarts used up"):
                await running
        worker.steps = STEPS
        # A person looked at it and resumes the run.
        async with supervised(spec) as (_, running):
            await running
    log = spec.log.read_text()
    assert "restored" in log
    assert "step_00000003" in log
    assert run.steps() == STEPS
    await run.check(reference, atol=GLOO_ROUNDING)


async def test_two_ranks_lose_no_update_by_a_damaged_newest_checkpoint(
    tmp_path: Path, tiny_model: str, redis_server: Any, reference: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """Its steps are committed: Redis holds them no more, the archive does."""
    run = RankedRun(tmp_path, tiny_model, redis_server, f"damaged-{os.getpid()}", {**SETTINGS, "save_trajectories": 0})
    request.addfinalizer(lambda: remove_weights(run.config()))
    spec, newest = run.spec(), run.root / "checkpoints" / "step_00000006"
    async with run.worker() as worker:
        worker.steps = STEPS - 2
        async with supervised(spec) as (_, running):
            queue = await run.queue()
            async with asyncio.timeout(400):
                while (await queue.status()).committed_step < STEPS - 2:
                    assert not running.done(), spec.log.read_text()[-4000:]
                    await asyncio.sleep(0.1)
            await queue.close()
        shard = newest / "__1_0.distcp"
        shard.write_bytes(shard.read_bytes()[:-1])
        worker.steps = STEPS
        async with supervised(spec) as (_, running):
            await running
    shutil.rmtree(newest.with_suffix(".damaged"))
    recorded = [json.loads(line) for line in (run.root / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in recorded if not line.get("update_lost")] == list(range(STEPS))
    await run.check(reference, atol=GLOO_ROUNDING)


async def test_a_rank_that_is_stopped_is_named_and_the_trainer_starts_again(
    tmp_path: Path, tiny_model: str, redis_server: Any, reference: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """SIGSTOP, with the settings as they are: its peers wait in a collective whose deadline is 10 minutes away."""
    run = RankedRun(tmp_path, tiny_model, redis_server, f"stopped-{os.getpid()}", {**SETTINGS, "save_trajectories": 0})
    request.addfinalizer(lambda: remove_weights(run.config()))
    spec = run.spec()
    async with run.worker(PAUSE_S) as worker, supervised(spec) as (trainer, running):
        worker.steps = STEPS - 1
        await until(lambda: run.steps() >= 4, running, spec.log)
        pid, stopped_at = await kill_rank(trainer, 1, signal.SIGSTOP), time.monotonic()
        worker.steps = STEPS
        named = f"rank 1 (host {socket.gethostname()}, pid {pid}): its process has been stopped"
        async with asyncio.timeout(WITHIN_S):
            await until(lambda: named in spec.log.read_text(), running, spec.log)
        print(f"named after {time.monotonic() - stopped_at:.1f} s")
        await until(lambda: trainer.restarts == 1, running, spec.log)
        print(f"started again after {time.monotonic() - stopped_at:.1f} s")
        await running
    assert run.steps() == STEPS
    await run.check(reference, atol=GLOO_ROUNDING)
