"""Every episode is finished or still owed and none is trained twice, whatever is done to Redis and the processes.

One small stage with every kind of fault runs by default; each kind alone, repeated, is a deep campaign.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from faults.account import Account
from faults.havoc import REPLY, REQUEST, fill_redis, kill_redis, lose_tail, pause_redis
from faults.intruders import Wedged
from faults.mix import EVERY_GAP as EVERY_GAP_AND_MORE
from faults.mix import play_mix
from faults.plan import ANYWHERE, GAPS, seeds
from faults.stage import Stage
from penstock.transfer_queue import Limits

pytestmark = [pytest.mark.redis, pytest.mark.crash]
WAIT = Limits(group_size=3, groups_per_step=2, max_staleness=1, lease_ttl_s=0.6, max_attempts=2, max_lost_leases=1000)
MEAN_BYTES = 12_000
"""Between two cuts of a connection: some dozens of calls."""
EVERY_GAP = len(GAPS) + 1

Faults = Callable[[Stage], Sequence[Coroutine[Any, Any, None]]]


async def play(seed: int, faults: Faults, gaps: int = 0, **options: Any) -> Account:
    """One stage under `faults`, its trainer killed in so many gaps. The account balances; no key is left of the run."""
    async with Stage(seed, **options) as stage:
        chosen = stage.chance.sample([*GAPS, ANYWHERE], k=gaps)
        account = await stage.play(*faults(stage), gaps=chosen)
        print(account.line)
        account.check()
        assert {name: count for name, count in account.kills.items() if name.startswith("trainer")} == {
            f"trainer:{gap}": 1 for gap in chosen
        }
        assert account.trained
        assert await stage.leftovers() == []
        if options.get("behind_proxy"):
            assert stage.proxy.cuts[REPLY]
            assert stage.proxy.cuts[REQUEST]
    return account


def kills_of_redis(times: int, mean_s: float = 0.35) -> Faults:
    return lambda stage: [
        stage.every(mean_s, lambda: kill_redis(stage.server, stage.chance), times=times, name="redis")
    ]


def pauses(seconds: float) -> Faults:
    return lambda stage: [stage.every(0.3, lambda: pause_redis(stage.server, seconds), times=1, name="pause")]


def full(times: int) -> Faults:
    return lambda stage: [stage.every(0.4, lambda: fill_redis(stage.client, 0.6), times=times, name="full")]


def kills_of_workers(times: int, mean_s: float = 0.6) -> Faults:
    return lambda stage: [stage.every(mean_s, stage.troupe.kill_worker, times=times)]


def cuts(seconds: float) -> Faults:
    def begin(stage: Stage) -> Sequence[Coroutine[Any, Any, None]]:
        stage.proxy.mean_bytes = MEAN_BYTES
        return [stop(stage)]

    async def stop(stage: Stage) -> None:
        await asyncio.sleep(seconds)
        async with asyncio.timeout(60):  # Redis may have stood still all that time
            while not (stage.proxy.cuts[REQUEST] and stage.proxy.cuts[REPLY]):
                await asyncio.sleep(0.05)
        stage.proxy.mean_bytes = 0

    return begin


def lost_tails(times: int) -> Faults:
    return lambda stage: [stage.every(0.3, lambda: lose_tail(stage.server, stage.chance), times=times, name="tail")]


def together(*kinds: Faults) -> Faults:
    return lambda stage: [fault for kind in kinds for fault in kind(stage)]


def in_turn(*kinds: Faults) -> Faults:
    """One after the other: a Redis that is dead cannot be filled."""

    async def run(stage: Stage) -> None:
        for kind in kinds:
            for fault in kind(stage):
                await fault

    return lambda stage: [run(stage)]


async def test_one_of_each_fault_in_one_run() -> None:
    """Redis killed, paused and full, a worker and a trainer killed, connections cut, clocks wrong by an hour."""
    (seed,) = seeds(1)
    kinds = together(in_turn(full(1), pauses(1.0), kills_of_redis(1)), kills_of_workers(1), cuts(3.0))
    account = await play(seed, kinds, gaps=2, behind_proxy=True, worker_options=["--clock-jumps"])
    assert (account.kills["redis"], account.kills["pause"], account.kills["full"]) == (1, 1, 1)
    assert account.kills["worker"]


async def test_tail_of_the_append_only_file_lost() -> None:
    """A machine with ``everysec`` dies: what was acknowledged may be owed again, and nothing is trained twice."""
    (seed,) = seeds(1)
    account = await play(seed, lost_tails(1), fsync="everysec", may_lose_tail=True)
    assert account.kills["tail"] == 1


CAMPAIGNS: dict[str, tuple[int, Faults, dict[str, Any]]] = {
    "redis killed, always": (2, kills_of_redis(5), {"fsync": "always"}),
    "redis killed, everysec": (2, kills_of_redis(5), {"fsync": "everysec"}),
    "redis paused": (1, pauses(2.0), {"limits": WAIT}),
    "redis paused for long": (1, pauses(30.0), {"limits": WAIT}),
    "redis full": (1, full(3), {}),
    "tail lost": (2, lost_tails(4), {"fsync": "everysec", "may_lose_tail": True, "gaps": 2}),
    "workers killed": (2, kills_of_workers(6), {}),
    "trainer killed in each gap": (2, together(), {"gaps": EVERY_GAP}),
    "connections cut": (2, cuts(3.0), {"behind_proxy": True}),
    "clocks jump": (1, lambda _: [asyncio.sleep(3.0)], {"worker_options": ["--clock-jumps"]}),
    "all at once": (
        1,
        together(kills_of_redis(5, 1.2), kills_of_workers(5, 1.0), cuts(6.0)),
        {"behind_proxy": True, "worker_options": ["--clock-jumps"], "gaps": 6},
    ),
}


@pytest.mark.deep
@pytest.mark.parametrize("name", CAMPAIGNS)
async def test_campaign(name: str) -> None:
    rounds, faults, options = CAMPAIGNS[name]
    for seed in seeds(rounds):
        account = await play(seed, faults, **options)
        assert account.steps > 1 or "paused" not in name


@pytest.mark.deep
async def test_every_fault_of_the_campaign() -> None:
    """The short form of ``penstock bench faults``: a dozen kills of each, and all that meddles from beside the run."""
    (seed,) = seeds(1)
    account, restarts = await play_mix(seed, len(EVERY_GAP_AND_MORE), load_s=5.0)
    print(account.line)
    account.check()
    assert set(account.kills) == {"redis", "worker", *(f"trainer:{gap}" for gap in EVERY_GAP_AND_MORE)}
    assert restarts["worker"] >= account.kills["worker"]
    assert account.counts["trainers_fenced"] == account.counts["loads"] == 1
    assert account.counts["strangers_refused"] == account.counts["clock_steps"] == account.kills["worker"]
    # Under overage "drop" a group may be dropped before its poison row has lost as many leases as it may.
    assert account.poison_rows >= 1 or account.reasons["dropped"] >= 1
    assert account.counts["payloads_deleted"] >= 1
    assert account.counts["logs_cut"] >= 1
    assert account.counts["completions_repeated"] >= 1


async def test_a_run_that_trains_nothing_is_called_wedged(monkeypatch: pytest.MonkeyPatch) -> None:
    """No trainer, and no fault that would explain it."""
    monkeypatch.setattr("faults.intruders.WEDGE_S", 0.5)
    async with Stage(0) as stage:
        with pytest.raises(Wedged, match="no step after 0"):
            await stage.intruders.watch(lambda: 0)
