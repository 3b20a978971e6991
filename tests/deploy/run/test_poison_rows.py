"""A row that ends its workers becomes dead letters and the run goes on; workers that die of everything end it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from tests.deploy.conftest import RECIPE

from penstock.agent_loops import AgentConfig
from penstock.deploy import load_config
from penstock.deploy.run.processes import RestartBudget
from penstock.deploy.run.supervisor import Watchdog
from penstock.testing import MemoryTransferQueue
from penstock.transfer_queue import COMPLETED, Lease, Limits, Segment, Task, Trajectory

GROUP, ROWS, ROUND_S = 8, 16, 5.0
LIMITS = Limits(group_size=GROUP, groups_per_step=ROWS, max_staleness=1, lease_ttl_s=15.0)
DEFAULTS = AgentConfig()


def completed(lease: Lease) -> Trajectory:
    one = np.zeros(1, dtype=np.int32)
    spans, mask = np.array([[0, 0, 1]], dtype=np.int32), np.ones(1, dtype=np.uint8)
    segment = Segment(one, one, mask, np.zeros(1, dtype=np.float32), spans, one)
    return Trajectory(lease.episode_id, lease.task.task_id, [segment], 1.0, COMPLETED, num_turns=1)


class Run:
    """Workers that die of rows, with the restarts that they have by default; time passes in rounds."""

    def __init__(self, poison_rows: int, workers: int) -> None:
        self.now = 0.0
        self.queue = MemoryTransferQueue(clock=lambda: self.now)
        apart = ROWS // max(poison_rows, 1)
        self._poison = {f"train/{number * apart}" for number in range(poison_rows)}
        limit = DEFAULTS.max_restarts
        self._budgets = {f"agent-{n}": RestartBudget(limit, 3600.0, clock=lambda: self.now) for n in range(workers)}
        self._held: dict[str, list[Lease]] = {name: [] for name in self._budgets}
        self._watchdog = Watchdog(load_config(RECIPE), [], print, self._forgive)
        self.deaths: Counter[str] = Counter()

    def _forgive(self) -> None:
        for budget in self._budgets.values():
            budget.forgive()

    async def play(self) -> bool:
        """False where a worker has died more often than it may."""
        await self.queue.create_run(LIMITS, "")
        await self.queue.submit([Task(f"train/{n}", "train", [], "sums", 0) for n in range(ROWS)])
        status = await self.queue.status()
        while status.episodes["completed"] + status.episodes["failed"] < ROWS * GROUP:
            for worker in self._held:
                if not await self._work(worker):
                    return False
            self.now += ROUND_S
            status = await self.queue.status()
            await self._watchdog.look(0, status, [])
        return True

    async def _work(self, worker: str) -> bool:
        held = self._held[worker]
        await self.queue.renew(held)
        limit = max(1, DEFAULTS.concurrency >> 2 * self.deaths[worker])  # as a restarted worker begins
        held += await self.queue.lease_episodes(worker, limit - len(held), 0)
        if any(lease.task.task_id in self._poison for lease in held):
            held.clear()
            self.deaths[worker] += 1
            return self._budgets[worker].spend()
        for lease in held:
            await self.queue.complete(lease, completed(lease))
        held.clear()
        return True


@pytest.mark.parametrize(("rows", "workers"), [(1, 1), (1, 2), (3, 1), (3, 2)])
async def test_poison_rows_become_dead_letters_and_the_run_goes_on(rows: int, workers: int) -> None:
    run = Run(rows, workers)
    assert await run.play()
    assert rows == 1 or sum(run.deaths.values()) > workers * DEFAULTS.max_restarts, (
        "restarts alone would have ended the run"
    )
    assert len(await run.queue.dead_letters(limit=1000)) == rows * GROUP, "no other episode is given up"


async def test_workers_that_die_of_everything_end_the_run() -> None:
    assert not await Run(ROWS, 2).play()


async def test_restarts_before_a_resumed_run_are_not_forgiven() -> None:
    queue = MemoryTransferQueue()
    await queue.create_run(LIMITS, "")
    forgiven: list[int] = []
    watchdog = Watchdog(load_config(RECIPE), [], print, lambda: forgiven.append(1))
    for given_up, times in ((3, 0), (4, 1), (4, 1)):
        queue._state.counts["killed_workers"] = given_up
        await watchdog.look(0, await queue.status(), [])
        assert len(forgiven) == times
