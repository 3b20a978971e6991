"""Workers and trainers are killed, in every gap and anywhere; clocks jump; connections are cut in mid-message."""

from __future__ import annotations

import asyncio

import pytest
from faults.gaps import ANYWHERE, GAPS
from faults.havoc import kill_redis
from faults.rounds import seeds
from faults.stage import Stage

pytestmark = [pytest.mark.redis, pytest.mark.crash]


async def test_workers_killed() -> None:
    for seed in seeds(2):
        async with Stage(seed) as stage:
            account = await stage.play(stage.every(0.6, "worker kills asked", stage.kill_worker, times=6))
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
            account = await stage.play(cut_for_a_while(stage, 3.0))
            print(account.line)
            account.check()
            assert account.kills["cut reply"]
            assert account.kills["cut request"]


async def cut_for_a_while(stage: Stage, seconds: float) -> None:
    assert stage.proxy is not None
    stage.proxy.mean_bytes = 12_000
    await asyncio.sleep(seconds)
    stage.proxy.mean_bytes = 0
    stage.kills.update({f"cut {way}": count for way, count in stage.proxy.cuts.items()})


async def test_clocks_of_workers_jump_by_an_hour() -> None:
    for seed in seeds(1):
        async with Stage(seed, worker_options=["--clock-jumps"]) as stage:
            account = await stage.play(asyncio.sleep(3.0))
            print(account.line)
            account.check()
            assert account.trained


async def test_everything_at_once() -> None:
    for seed in seeds(1):
        async with Stage(seed, behind_proxy=True, worker_options=["--clock-jumps"]) as stage:
            faults = [
                stage.every(1.2, "redis", lambda: kill_redis(stage.server, stage.chance), times=5),
                stage.every(1.0, "worker kills asked", stage.kill_worker, times=5),
                cut_for_a_while(stage, 6.0),
            ]
            account = await stage.play(*faults, gaps=stage.chance.choices([*GAPS, ANYWHERE], k=6))
            print(account.line)
            account.check()
            assert await stage.leftovers() == []
