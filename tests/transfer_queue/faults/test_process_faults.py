"""Workers and trainers are killed, in every gap and anywhere; clocks jump; connections are cut in mid-message."""

from __future__ import annotations

import asyncio
import time

import pytest

from faults.clock import HOUR_S, REAL_TIME
from faults.episodes import cursor_at, task_at
from faults.gaps import ANYWHERE, GAPS
from faults.havoc import kill_redis
from faults.proxy import REPLY, REQUEST, CuttingProxy
from faults.rounds import seeds
from faults.stage import Stage

pytestmark = [pytest.mark.redis, pytest.mark.crash]
MEAN_BYTES = 12_000
"""Between two cuts of a connection: some dozens of calls."""


async def test_workers_killed() -> None:
    for seed in seeds(2):
        async with Stage(seed) as stage:
            account = await stage.play(stage.every(0.6, stage.kill_worker, times=6))
            print(account.line)
            account.check()
            assert account.kills["worker"]
            assert await stage.leftovers() == []


async def test_trainer_killed_in_each_gap() -> None:
    for seed in seeds(2):
        async with Stage(seed) as stage:
            gaps = stage.chance.sample([*GAPS, ANYWHERE], k=len(GAPS) + 1)
            account = await stage.play(gaps=gaps)
            print(account.line)
            account.check()
            assert {name: count for name, count in account.kills.items() if name.startswith("trainer")} == {
                f"trainer:{gap}": 1 for gap in gaps
            }
            assert await stage.leftovers() == []


async def test_connections_cut_in_mid_message() -> None:
    for seed in seeds(2):
        async with Stage(seed, behind_proxy=True) as stage:
            stage.proxy.mean_bytes = MEAN_BYTES
            account = await stage.play(stop_cutting(stage.proxy, after_s=3.0))
            print(account.line)
            account.check()
            assert stage.proxy.cuts[REPLY]
            assert stage.proxy.cuts[REQUEST]


async def stop_cutting(proxy: CuttingProxy, after_s: float) -> None:
    await asyncio.sleep(after_s)
    proxy.mean_bytes = 0


async def test_clocks_of_workers_jump_by_an_hour() -> None:
    for seed in seeds(1):
        async with Stage(seed, worker_options=["--clock-jumps"]) as stage:
            account = await stage.play(asyncio.sleep(3.0))
            print(account.line)
            account.check()
            assert account.trained


@pytest.mark.parametrize("jump_s", [-HOUR_S, HOUR_S])
async def test_a_clock_decides_nothing_about_leases(monkeypatch: pytest.MonkeyPatch, jump_s: float) -> None:
    async with Stage(0) as stage:
        queue = stage.queue
        await queue.submit([task_at(0)], cursor_at(1))
        held = await queue.lease_episodes("old", 9, 0)
        assert held
        monkeypatch.setattr(time, "time", lambda: REAL_TIME() + jump_s)
        assert await queue.lease_episodes("new", 9, 0) == []
        assert await queue.renew(held) == []


async def test_everything_at_once() -> None:
    for seed in seeds(1):
        async with Stage(seed, behind_proxy=True, worker_options=["--clock-jumps"]) as stage:
            stage.proxy.mean_bytes = MEAN_BYTES
            faults = [
                stage.every(1.2, lambda: kill_redis(stage.server, stage.chance), times=5, name="redis"),
                stage.every(1.0, stage.kill_worker, times=5),
                stop_cutting(stage.proxy, after_s=6.0),
            ]
            account = await stage.play(*faults, gaps=stage.chance.choices([*GAPS, ANYWHERE], k=6))
            print(account.line)
            account.check()
            assert await stage.leftovers() == []
