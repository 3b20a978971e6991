"""An agent worker process: ``python -m faults.worker PLAN NAME [--url URL] [--clock-jumps]``.

Several coroutines lease episodes, journal their turns and end them. SIGTERM: leases are handed back, then exit 0.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from faults.episodes import (
    JournalBook,
    JournalBroken,
    Records,
    is_poison,
    next_entry,
    shared_print,
    trajectory_of,
    trajectory_print,
)
from faults.havoc import jump_now_and_then
from faults.plan import FaultPlan, check_parent, load_plan
from faults.redis_clock import movable_redis_clock
from penstock.transfer_queue import (
    Announcement,
    BadPayload,
    JournalEntry,
    JournalMismatch,
    Lease,
    LeaseLost,
    Outcome,
    OutcomeKind,
    QueueUnavailable,
    RedisTransferQueue,
    Trajectory,
)

Ended = tuple[Lease, Trajectory, dict[str, Any]]
"""A completed episode that waits for others, with the facts that are written down about it."""
COROUTINES = 4
LEASES = 2
TOGETHER = 0.3
"""Share of rounds whose completed episodes are ended together: half by one call, half by a call each at once."""
INFRA = Outcome(OutcomeKind.INFRA_ERROR, "the box died", "sandbox")
ENDINGS = {"complete": 0.86, "fail": 0.09, "release": 0.05}
OTHERWISE = 0.05
"""Share of episodes that are ended a second time under their fence, with another reward: it must change nothing."""
FORKED = 0.7
"""Share of attempts that fork their episode, where groups have branches."""
SHORT_PAUSE_S, IDLE_S = 0.004, 0.02


class Worker:
    """The coroutines of one process. What it was told is in ``told/NAME.jsonl``."""

    def __init__(self, plan: FaultPlan, name: str, queue: RedisTransferQueue, stopping: asyncio.Event) -> None:
        self._plan = plan
        self._name = name
        self._queue = queue
        self._chance = random.Random(f"{plan.seed}/{name}")
        self._told = Records(plan.folder / "told" / f"{name}.jsonl")
        self._journals = JournalBook(plan.folder / "journals", may_lose_tail=plan.may_lose_tail)
        self._stopping = stopping
        self._seen: Announcement | None = None
        self._parent = os.getppid()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(COROUTINES):
                group.create_task(self._work(f"{self._name}.{number}"))

    async def _work(self, owner: str) -> None:
        while not self._stopping.is_set():
            check_parent(self._parent)
            try:
                await self._round(owner)
            except QueueUnavailable as error:
                self._told.write("unavailable", cause=str(error))

    async def _round(self, owner: str) -> None:
        latest = await self._queue.latest_version()
        version = latest.version if latest else 0
        if latest is not None and latest != self._seen:
            self._seen = latest
            self._told.write("version", version=version, contents=latest.manifest["contents"])
        # Who dies of a poison row is the process: the queue must see that all its leases were lost together.
        worker = self._name if self._plan.poison else owner
        leases = await self._queue.lease_episodes(worker, LEASES, version)
        ended: list[Ended] | None = [] if self._chance.random() < TOGETHER else None
        for lease in leases:
            facts = (
                {} if lease.origin is None else {"parent": lease.origin.parent, "shared": shared_print(lease.journal)}
            )
            self._told.write("leased", episode=lease.episode_id, fence=lease.fence, owner=owner, **facts)
            await self._attempt(lease, version, ended)
        if ended:
            await self._complete_at_once(ended)
        if not leases:
            await asyncio.sleep(IDLE_S)

    async def _attempt(self, lease: Lease, version: int, ended: list[Ended] | None) -> None:
        try:
            if self._stopping.is_set():
                return await self._queue.release(lease)
            await self._check_journal(lease)
            if self._plan.poison and is_poison(lease.episode_id):
                self._told.write("poisoned", episode=lease.episode_id, fence=lease.fence)
                os.kill(os.getpid(), signal.SIGKILL)
            await self._run_episode(lease, version, ended)
        except (LeaseLost, BadPayload) as refusal:
            await self._refused(lease, refusal)

    async def _refused(self, lease: Lease, refusal: LeaseLost | BadPayload) -> None:
        if isinstance(refusal, LeaseLost):
            self._told.write("lease_lost", episode=lease.episode_id, fence=lease.fence)
            return
        # Its journal names a version that the queue forgot; once the trainer published that again, it is good.
        if not self._plan.may_lose_tail:
            raise refusal
        await self._queue.release(lease)
        await asyncio.sleep(IDLE_S)

    async def _check_journal(self, lease: Lease) -> None:
        """A lease that ran out before its turn came may be of an episode that a later owner ended and closed."""
        try:
            self._journals.check(lease)
        except JournalBroken as error:
            if lease.episode_id in await self._queue.renew([lease]):
                raise LeaseLost(str(error)) from error
            raise

    async def _run_episode(self, lease: Lease, version: int, ended: list[Ended] | None) -> None:
        entries = list(lease.journal)
        while entry := next_entry(lease.episode_id, entries, max(version, lease.min_version), self._chance):
            await self._think()
            self._journals.write(lease, "about", entry)
            entries.append(entry)
            await self._append(lease, entries)
            self._journals.write(lease, "told", entry)
        if self._plan.limits.branches and self._chance.random() < FORKED:
            await self._fork(lease, entries)
        (ending,) = self._chance.choices([*ENDINGS], [*ENDINGS.values()])
        if ending == "complete":
            await self._complete(lease, entries, ended)
        elif ending == "fail":
            again = await self._queue.fail(lease, INFRA)
            self._told.write("failed", episode=lease.episode_id, fence=lease.fence, again=again)
        else:
            await self._queue.release(lease)

    async def _fork(self, lease: Lease, entries: Sequence[JournalEntry]) -> None:
        """After its first entry. A queue that lost its tail may have no such entry any more."""
        self._told.write("forks", parent=lease.episode_id, shared=shared_print(entries))
        try:
            branches = await self._queue.fork(lease, 1, entries[:1], self._plan.limits.branches)
        except JournalMismatch:
            if not self._plan.may_lose_tail:
                raise
        else:
            self._told.write("forked", parent=lease.episode_id, branches=branches)

    async def _append(self, lease: Lease, entries: Sequence[JournalEntry]) -> None:
        """The newest entry, and before it those that the queue lost with its tail."""
        position = len(entries) - 1
        while position < len(entries):
            try:
                await self._queue.journal(lease, entries[position], position)
                position += 1
            except JournalMismatch as error:
                if not self._plan.may_lose_tail or error.entries >= position:
                    raise
                position = error.entries

    async def _think(self) -> None:
        """Now and then so long that the lease runs out: the worker comes back as one that was thought dead."""
        slow = self._chance.random() < 0.004
        await asyncio.sleep(1.5 * self._plan.limits.lease_ttl_s if slow else self._chance.uniform(0, SHORT_PAUSE_S))

    async def _complete(self, lease: Lease, entries: list[JournalEntry], ended: list[Ended] | None) -> None:
        """At once, or with others of this round that go to `ended`."""
        reward = None if self._chance.random() < 0.02 else float(self._chance.random() < 0.5)
        trajectory = trajectory_of(lease, entries, reward)
        facts: dict[str, Any] = {"episode": lease.episode_id, "fence": lease.fence, "reward": reward}
        facts["print"] = trajectory_print(trajectory)
        self._told.write("about", **facts)
        if ended is not None:
            ended.append((lease, trajectory, facts))
            return
        await self._queue.complete(lease, trajectory)
        self._acknowledged(facts)
        if self._chance.random() < OTHERWISE and not self._plan.may_lose_tail:
            await self._queue.complete(lease, trajectory_of(lease, entries, 1.0 - (reward or 0.0)))
            self._told.write("repeated", episode=lease.episode_id, fence=lease.fence)

    async def _complete_at_once(self, ended: list[Ended]) -> None:
        """Their calls share round trips with each other and with those of the other coroutines."""
        calls = [self._queue.complete(lease, trajectory) for lease, trajectory, _ in ended]
        unavailable: list[BaseException] = []
        for (lease, _, facts), outcome in zip(ended, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if outcome is None:
                self._acknowledged(facts)
            elif isinstance(outcome, LeaseLost | BadPayload):
                await self._refused(lease, outcome)
            else:
                unavailable.append(outcome)
        if unavailable:
            raise unavailable[0]

    def _acknowledged(self, facts: dict[str, Any]) -> None:
        self._told.write("acknowledged", **facts)
        self._journals.close(facts["episode"])


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("plan", type=Path)
    parser.add_argument("name")
    parser.add_argument("--url")
    parser.add_argument("--clock-jumps", action="store_true")
    given = parser.parse_args()
    plan, stopping = load_plan(given.plan), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    with movable_redis_clock(enabled=plan.movable_clock):
        queue = await RedisTransferQueue.connect(given.url or plan.url, plan.run, plan.config, plan.password)
        try:
            async with jump_now_and_then(random.Random(f"{plan.seed}/{given.name}/clock"), given.clock_jumps):
                await Worker(plan, given.name, queue, stopping).run()
        finally:
            await queue.close()


if __name__ == "__main__":
    asyncio.run(main())
