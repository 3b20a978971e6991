"""Whole runs whose engine and trainer share one device in turns: the byte budget, kills in a turn, a lent device."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.deploy.conftest import SMALL, LivingRun, assert_accounts_balance, assert_nothing_left

from penstock.deploy import RunConnection
from penstock.transfer_queue import TransferQueue, Turns

pytestmark = [
    *(pytest.mark.deep, pytest.mark.crash, pytest.mark.slow, pytest.mark.redis, pytest.mark.bwrap, pytest.mark.torch),
    pytest.mark.timeout(1500),
]

BUDGET = 72 << 20
"""Above what either side needs of the calculator's model, and below what both need together."""
SHARED = ("placement.colocated=true", f"placement.memory_budget_bytes={BUDGET}")


def assert_the_budget_holds(run: LivingRun) -> None:
    """Both sides report, their claims and what they measure are never above it together, and each had turns."""
    reports = run.rows("turns.jsonl")
    assert max(report["total_bytes"] for report in reports) <= BUDGET
    assert max(report["total_used"] for report in reports) <= BUDGET
    for side in ("engine", "trainer"):
        own = [report for report in reports if report["side"] == side]
        assert max(report["used"] for report in own) > BUDGET // 10
        claimed = [report for report in own if report["holds"]]
        assert all(report["used"] <= report["bytes"] for report in claimed)
        assert {report["used"] for report in own if not report["holds"]} == {0}


VICTIMS = [
    ("trainer", ("train-rank",)),
    ("engine", ("penstock.deploy.cli rollout",)),
    ("engine", ("engines.hf.server",)),
]


def test_each_side_killed_in_its_turn(start_run) -> None:
    """Trainer, sidecar and engine, each while it has the devices: the other side gets them, and the run ends whole."""
    run = start_run("turns", *SHARED, *SMALL, "trainer.steps=24")  # three kills, and steps after each
    seen: list[int] = []
    for number, (side, victim) in enumerate(VICTIMS):
        run.wait_for(lambda goal=2 + 2 * number: run.steps() >= goal)
        seen += run.pids()
        fence = kill_in_its_turn(run, side, *victim)
        run.wait_for(lambda after=fence, dead=side: gets_on(run, after, dead))
    summary = run.finish()
    assert summary["steps"] == 24
    assert_accounts_balance(summary)
    assert (summary["restarts"]["trainer"], summary["restarts"]["rollout-0"]) == (1, 1)
    assert_the_budget_holds(run)
    assert_nothing_left(run, seen)


def kill_in_its_turn(run: LivingRun, side: str, *victim: str) -> int:
    """Stops the process, looks whose turn it is, and kills it where it is its own. Returns the fence of that turn."""
    fences: list[int] = []

    def is_killed() -> bool:
        for pid in run.pids(*victim)[:1]:
            os.kill(pid, signal.SIGSTOP)
            fences.extend(one.fence for one in turns_of(run).holders if one.holds and one.side == side)
            os.kill(pid, signal.SIGKILL if fences else signal.SIGCONT)
        return bool(fences)

    run.wait_for(is_killed)
    return fences[0]


def gets_on(run: LivingRun, fence: int, dead: str) -> bool:
    return any(one.fence > fence and one.holds for one in turns_of(run).holders if one.side != dead)


def turns_of(run: LivingRun) -> Turns:
    turns: Turns = asked(run, lambda queue: queue.turns())
    return turns


def asked(run: LivingRun, question: Callable[[TransferQueue], Awaitable[Any]]) -> Any:
    """The answer of the run's queue."""

    async def ask() -> Any:
        link = RunConnection.from_lines((run.root / "connect.env").read_text())
        queue, _ = await link.join()
        try:
            return await question(queue)
        finally:
            await queue.close()

    return asyncio.run(ask())


def test_a_lent_server_samples_between_steps(start_run) -> None:
    """It is asleep while the trainer takes its step, samples in between, and its kill gives the device back; the server
    with a device of its own takes no turn."""
    lent = ("placement.lend=true", f"placement.memory_budget_bytes={BUDGET}")
    # One request at a time for 64 episodes keeps both servers full while a batch is sampled, for longer than the second
    # between two heartbeats.
    full = ("rollout.max_concurrent=1", "groups_per_step=8", "group_size=8", "data.eval=null", "agent.workers=1")
    run = start_run("lent", *lent, *full, "trainer.steps=12")
    run.wait_for(lambda: run.steps() >= 2 and samples(run, "rollout-lent-0"))
    seen = run.pids()
    fence = kill_in_its_turn(run, "engine", "penstock.deploy.cli rollout", "--lent")
    run.wait_for(lambda: gets_on(run, fence, "engine"))
    run.wait_for(lambda: samples(run, "rollout-lent-0"))
    summary = run.finish()
    assert summary["steps"] == 12
    assert_accounts_balance(summary)
    assert (summary["restarts"]["rollout-lent-0"], summary["restarts"]["rollout-0"]) == (1, 0)
    assert_the_budget_holds(run)
    holders = {report["holder"].split()[0] for report in run.rows("turns.jsonl") if report["side"] == "engine"}
    assert holders == {"rollout-lent-0"}
    assert_nothing_left(run, seen)


def samples(run: LivingRun, server: str) -> bool:
    servers = asked(run, lambda queue: queue.servers())
    return any(one.server_id == server and one.in_flight and not one.asleep for one in servers)


@pytest.mark.parametrize("level", [1, 2])
def test_the_quickstart_learns_in_turns(start_run, level: int) -> None:
    """The recipe with one key changed, and a budget; under level 2, which only loads more, in few steps."""
    steps = 26 if level == 1 else 3
    words = ("trainer.warmup_steps=2", f"trainer.steps={steps}", f"placement.sleep_level={level}")
    run = start_run(f"shared-{level}", *SHARED, *words)
    summary = run.finish()
    assert summary["steps"] == steps
    assert_accounts_balance(summary)
    assert (summary["staleness_max"] <= 2, sum(summary["restarts"].values())) == (True, 0)
    assert summary["logprob_abs_diff_mean"] <= 1e-3
    assert_the_budget_holds(run)
    assert summary["turns"]["trainer"] >= steps
    assert summary["device_bytes_claimed_max"] <= BUDGET
    assert level == 2 or summary["eval_reward"] >= 0.9
