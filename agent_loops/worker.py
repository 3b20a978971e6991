"""An agent worker: one asyncio process that keeps up to `concurrency` episodes running.

task         consumes                waits for                        woken by
admit        client.best_version,    room; a server; admission        an episode's end; its own back-off
             queue.lease_episodes
episode × N  one lease               model, tools, reward             (see running.py, episode.py)
renew        leases held             a third of the lease's TTL       the clock; cancels episodes that were lost
adapt        client.servers, 429s    ADAPT_S                          the clock; wakes admit (concurrency.py)
report       waits, counts           REPORT_S                         the clock
watch        the loop's beat         a thread of its own              names code that blocks the loop (loop_watch.py)

Shutdown, healthy (cancellation): admission stops, episodes are cancelled, leave their tools to the next owner and hand
their leases back with their journals, within DRAIN_DEADLINE_S. Crashed (kill -9): leases run out and other workers go
on from the journals. Either way nothing that was sampled is lost.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import replace

from penstock.agent_loops.collector import frozen_start
from penstock.agent_loops.concurrency import ADAPT_S, Concurrency, WatchedClient
from penstock.agent_loops.errors import WorkerStopped
from penstock.agent_loops.job import WorkerJob, build_parts
from penstock.agent_loops.loop_watch import LoopWatch
from penstock.agent_loops.parts import EpisodeParts
from penstock.agent_loops.reward import may_need_sandbox
from penstock.agent_loops.running import CHUNK, RunningEpisodes
from penstock.agent_loops.stats import WorkerStats
from penstock.agent_loops.traced_sandbox import traced
from penstock.sandbox import Sandbox, SandboxError, make_sandbox
from penstock.tools import close_tools
from penstock.transfer_queue import Lease, QueueError

BACK_OFF_S = (0.05, 0.2)
"""First and longest pause while the queue admits nothing, before jitter."""
GATHER_S = 0.005
"""After an episode ends, others are given this long to end too, so that one round trip leases several."""
REPORT_S = 5.0
NO_SERVER_DEADLINE_S = 900.0
log = logging.getLogger(__name__)


async def run_worker(job: WorkerJob) -> None:
    """Run episodes until cancelled.

    Raises `AgentError` (recipe, template), `SandboxError` (no box can be made), `WorkerStopped` and `QueueError`.
    """
    sandbox = _sandbox_of(job)
    parts: EpisodeParts | None = None
    try:
        parts = build_parts(job, sandbox)
        with frozen_start():
            await Worker(job, parts).run()
    finally:
        if parts is not None:
            await close_tools(parts.tools.values())
            if parts.reward is not None:
                await parts.reward.close()
        if sandbox is not None:
            await sandbox.close()


def _sandbox_of(job: WorkerJob) -> Sandbox | None:
    """Tools must have one; rewards of verl's names may do without, and say so where a program is to be run."""
    if not job.tools and not may_need_sandbox(job.config):
        return None
    try:
        return traced(make_sandbox(job.sandbox, job.name, job.sandbox_token, job.config.episode_deadline_s))
    except SandboxError as error:
        if job.tools:
            raise
        log.warning("no sandbox for rewards: %s", error)
        return None


class Worker:
    """The process's one loop. `run` is called once."""

    def __init__(self, job: WorkerJob, parts: EpisodeParts) -> None:
        self.stats = WorkerStats(job.metrics)
        self.concurrency = Concurrency(job.bounds)
        self._job = job
        self._parts = replace(parts, worker=job.name, on_span=job.metrics.span)
        self._room = asyncio.Event()
        self.episodes = RunningEpisodes(self._parts, self.stats, self._room.set)
        self._watch = LoopWatch()
        self._random = random.Random(f"{job.seed}/{job.name}")
        self._pause_s = BACK_OFF_S[0]
        self._server_seen = time.monotonic()
        job.metrics.follow(lambda: len(self.episodes), lambda: self.concurrency.limit)

    async def run(self) -> None:
        self._watch.start()
        keepers = [asyncio.create_task(keeper) for keeper in (self._renew(), self._report(), self._adapt())]
        for keeper in keepers:
            keeper.add_done_callback(lambda _: self._room.set())
        try:
            while True:
                _raise_from(keepers)
                self._stop_if_broken()
                await self._admit()
        finally:
            await self.episodes.drain()
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            self._watch.stop()
            await self._flush()

    # admission -----------------------------------------------------------------------------------------------------
    async def _admit(self) -> None:
        """One look at the queue, or one wait for room."""
        free = self.concurrency.limit - len(self.episodes)
        if free <= 0:
            self._room.clear()
            await self._room.wait()
            await asyncio.sleep(GATHER_S)
            return
        version = await self._job.client.best_version()
        leases: list[Lease] = []
        if version is not None:
            leases = await self._job.queue.lease_episodes(self._job.name, min(free, CHUNK), version)
        for lease in leases:
            self.episodes.start(lease)
        self._server_seen = time.monotonic() if version is not None else self._server_seen
        if leases:
            self._pause_s = BACK_OFF_S[0]
        else:
            await self._back_off("server" if version is None else "admission", free)

    async def _back_off(self, cause: str, free: int) -> None:
        pause_s = self._pause_s * self._random.uniform(0.75, 1.25)
        self._pause_s = min(self._pause_s * 1.5, BACK_OFF_S[1])
        self.stats.add_wait(cause, pause_s * free / self._job.config.concurrency)
        await asyncio.sleep(pause_s)

    # keepers -------------------------------------------------------------------------------------------------------
    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._job.lease_ttl_s / 3)
            await self.episodes.renew()

    async def _adapt(self) -> None:
        """With a client that does not tell how its servers are, the limit stays."""
        client = self._job.client
        while isinstance(client, WatchedClient):
            await asyncio.sleep(ADAPT_S)
            try:
                servers = await client.servers()
            except QueueError as error:
                log.warning("the servers' load is not known: %s", error)
                continue
            before = self.concurrency.limit
            limit = self.concurrency.saw(servers, client.refused, len(self.episodes), time.monotonic())
            if limit > before:
                self._room.set()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            await self._flush()
            line, lag_s = self.stats.line(len(self.episodes)), self._watch.take_longest_s()
            self._job.metrics.lag_s.set(lag_s)
            log.info("%s: %s; limit %d, loop lag %.3f s", self._job.name, line, self.concurrency.limit, lag_s)

    async def _flush(self) -> None:
        for cause, seconds in self.stats.take_waits().items():
            try:
                await self._job.queue.add_wait("agent", cause, seconds)
            except QueueError as error:
                log.warning("waits not recorded: %s", error)

    # giving up -----------------------------------------------------------------------------------------------------
    def _stop_if_broken(self) -> None:
        if self.stats.failures_in_a_row >= self._job.max_failures_in_a_row:
            last = self.stats.last_failure
            raise WorkerStopped(
                f"{self.stats.failures_in_a_row} infrastructure failures in a row and no success; "
                f"the last one: {last.component}: {last.reason}"
            )
        if time.monotonic() - self._server_seen > NO_SERVER_DEADLINE_S:
            raise WorkerStopped(f"no rollout server for {NO_SERVER_DEADLINE_S:.0f} s; see the rollout servers' logs")


def _raise_from(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done():
            task.result()
