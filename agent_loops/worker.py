"""An agent worker: one asyncio process that keeps up to `concurrency` episodes running.

task         consumes                waits for                        woken by
admit        client.best_version,    capacity; a server; admission    an episode's end; its own back-off
             queue.lease_episodes
episode × N  one lease               model, tools, reward             (see `RunningEpisodes`, episode.py)
renew        leases held             a third of the lease's TTL       the clock; cancels episodes whose lease is lost
adapt        client.servers, 429s    ADAPT_S                          the clock; wakes admit (concurrency.py)
report       waits, counts           REPORT_S                         the clock
watch        the loop's beat         its own thread                   names code that blocks the loop (loop_watch.py)

Shutdown, healthy (cancellation): admission stops, episodes are cancelled, leave their tools to the next owner and hand
their leases back with their journals, within DRAIN_DEADLINE_S. Crashed (kill -9): leases expire and other workers
resume from the journals. Either way nothing that was journaled is lost; an answer under way is sampled again.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

from penstock.agent_loops.base import WorkerServices, find_loop
from penstock.agent_loops.chat.chat import chat_of
from penstock.agent_loops.concurrency import ADAPT_S, Concurrency, WatchedClient
from penstock.agent_loops.config import AgentConfig
from penstock.agent_loops.episode import Episode
from penstock.agent_loops.errors import LoadError, WorkerStopped
from penstock.agent_loops.llm import GenerateClient
from penstock.agent_loops.loader import allow_imports_from, load_object
from penstock.agent_loops.loop_watch import BLOCKING, LoopWatch
from penstock.agent_loops.metrics import WorkerMetrics, WorkerStats
from penstock.agent_loops.rewards.registry import load_reward, may_need_sandbox
from penstock.agent_loops.sources import verify_sources
from penstock.agent_loops.teachers import Teachers
from penstock.agent_loops.usage import WorkerUsage, observed
from penstock.common import Backoff, cancel_and_wait, frozen_start, uncollected
from penstock.sandbox import Sandbox, SandboxConfig, SandboxError, make_sandbox
from penstock.sandbox.managed import follow_costs
from penstock.tools import ToolConfig, close_tools, configs_of, make_tools, need_sandbox
from penstock.transfer_queue import Lease, LeaseLost, Outcome, OutcomeKind, QueueError, QueueUnavailable, RunContext

BACKOFF = Backoff(0.05, 0.2, factor=1.5, jitter=(0.75, 1.25))
"""Pauses while the queue admits nothing."""
REPORT_S = 5.0
NO_SERVER_DEADLINE_S = 900.0
DRAIN_DEADLINE_S = 10.0
CHUNK = 256
"""Leases per call: thousands at once would block the queue and this worker's event loop."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """The arguments of one agent worker. The caller closes the client."""

    name: str
    """Unique in the run; used in leases and logs."""
    run: RunContext
    config: AgentConfig
    client: GenerateClient
    tools: list[ToolConfig] = field(default_factory=list)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    max_failures_in_a_row: int = 20
    server_slots: int = 0
    """Requests that a rollout server decodes together; 0: unknown."""
    restarts: int = 0
    """Earlier processes of this worker that died."""
    metrics: WorkerMetrics = field(default_factory=WorkerMetrics)
    """The worker's metrics; served by the caller."""

    @property
    def server_requests(self) -> int:
        """Requests above which a server counts as loaded: by default twice what it decodes at once. 0: unlimited."""
        configured = self.config.server_requests
        return 2 * self.server_slots if configured is None else configured


def build_services(job: WorkerJob, sandbox: Sandbox | None) -> WorkerServices:
    """Loads template, tools, loop and reward. Raises `AgentError` naming the mistake in the recipe."""
    run = job.run
    allow_imports_from(run.recipe_dir.resolve())
    tools = make_tools(job.tools, sandbox, partial(load_object, recipe_dir=run.recipe_dir))
    chat = chat_of(run.model, job.config)
    verified = verify_sources(chat, job.config, tools)
    log.info(
        "chat template verified on %d conversations; %s",
        verified.conversations,
        verified.summary(job.config.thinking_history),
    )
    find = lru_cache(partial(find_loop, recipe_dir=run.recipe_dir))
    for config in job.config.of_sources():
        loop = find(config.loop)
        loop.check_settings(config.settings)
        if config.forks is not None and not loop.can_fork:
            raise LoadError(f"agent.forks: {config.loop} keeps more than the journal of its episode: no branches")
    return WorkerServices(
        worker=job.name,
        config=job.config,
        queue=run.queue,
        client=job.client,
        chat=chat,
        tools=tools,
        tool_configs=configs_of(tools),
        find_loop=find,
        sandbox=sandbox,
        on_lost=job.sandbox.on_lost,
        reward=load_reward(job.config, run.recipe_dir, sandbox),
        recipe_dir=run.recipe_dir,
        teachers=Teachers(job.config.teachers) if job.config.teachers else None,
        routing_replay=run.routing_replay,
        max_model_len=run.max_model_len,
    )


async def run_worker(job: WorkerJob) -> None:
    """Runs episodes until cancelled.

    Raises `AgentError` (recipe, template), `SandboxError` (no box can be made), `WorkerStopped` and `QueueError`.
    """
    usage = WorkerUsage(job.name)
    async with AsyncExitStack() as opened:  # each part is closed, also if another one does not
        sandbox = _sandbox_of(job, usage)
        if sandbox is not None:
            opened.push_async_callback(sandbox.close)
        with uncollected():  # it imports transformers
            services = replace(build_services(job, sandbox), on_use=usage.add)
        for part in (services.teachers, services.reward):
            if part is not None:
                opened.push_async_callback(part.close)
        opened.push_async_callback(close_tools, services.tools.values())
        opened.push_async_callback(services.shared.close)
        with frozen_start():
            async with usage.reported(job.run.queue):
                await Worker(job, services).run()


def _sandbox_of(job: WorkerJob, usage: WorkerUsage) -> Sandbox | None:
    """Required by tools and some loops; rewards by verl's names may work without, and fail when they must run a
    program."""
    loops = (find_loop(name, job.run.recipe_dir) for name in job.config.loops)
    load = partial(load_object, recipe_dir=job.run.recipe_dir)
    required = need_sandbox(job.tools, load) or any(loop.needs_sandbox for loop in loops)
    if not required and not may_need_sandbox(job.config):
        return None
    try:
        deadline_s = max(one.episode_deadline_s for one in job.config.of_sources())
        sandbox = make_sandbox(job.sandbox, job.name, job.run.token, deadline_s, run=job.run.name)
    except SandboxError as error:
        if required:
            raise
        log.warning("no sandbox for rewards: %s", error)
        return None
    follow_costs(sandbox, job.metrics.costs)
    return observed(sandbox, usage)


class Worker:
    """Admits, renews and reports. `run` is called once."""

    def __init__(self, job: WorkerJob, services: WorkerServices) -> None:
        self.stats = WorkerStats(job.metrics)
        self.concurrency = Concurrency(job.config.concurrency, job.server_requests, job.restarts)
        self._job = job
        self._services = replace(services, worker=job.name, on_span=job.metrics.span)
        self._room = asyncio.Event()
        self.episodes = RunningEpisodes(self._services, self.stats, self._room.set)
        self._watch = LoopWatch()
        self._pauses = BACKOFF.pauses(random.Random(f"{job.run.seed}/{job.name}"))
        self._server_seen = time.monotonic()
        job.metrics.follow(lambda: len(self.episodes), lambda: self.concurrency.limit)

    async def run(self) -> None:
        self._watch.start()
        keepers = [asyncio.create_task(keeper) for keeper in (self._renew(), self._report(), self._adapt())]
        for keeper in keepers:
            keeper.add_done_callback(lambda _: self._room.set())
        try:
            while True:
                for keeper in keepers:
                    if keeper.done():
                        keeper.result()
                self._stop_if_broken()
                await self._admit()
        finally:
            await self.episodes.drain()
            await cancel_and_wait(keepers)
            self._watch.stop()
            await self._flush()

    # admission -----------------------------------------------------------------------------------------------------
    async def _admit(self) -> None:
        """Leases once, or waits for capacity."""
        free = self.concurrency.limit - len(self.episodes)
        if free <= 0:
            self._room.clear()
            await self._room.wait()
            # Wait after an episode ends: others may end too, so that one round trip leases several.
            await asyncio.sleep(0.005)
            return
        version = await self._job.client.best_version()
        leases: list[Lease] = []
        if version is not None:
            leases = await self._job.run.queue.lease_episodes(self._job.name, min(free, CHUNK), version)
        for lease in leases:
            self.episodes.start(lease)
        if version is not None or await self._asleep():
            self._server_seen = time.monotonic()
        if leases:
            self._pauses.reset()
        else:
            pause_s = self._pauses.next_s()
            cause = "server" if version is None else "admission"
            self.stats.add_wait(cause, pause_s * free / self._job.config.concurrency)
            await asyncio.sleep(pause_s)

    async def _asleep(self) -> bool:
        """Return True if servers wait for the trainer to hand their devices back."""
        client = self._job.client
        return isinstance(client, WatchedClient) and any(server.asleep for server in await client.servers())

    # keepers -------------------------------------------------------------------------------------------------------
    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._job.run.lease_ttl_s / 3)
            await self.episodes.renew()

    async def _adapt(self) -> None:
        """Without a `WatchedClient` the limit is constant."""
        client = self._job.client
        while isinstance(client, WatchedClient):
            await asyncio.sleep(ADAPT_S)
            if self._job.restarts and not self.stats.outcomes:
                continue  # one of its episodes may have ended the worker before: no more next to it until one has ended
            try:
                servers = await client.servers()
            except QueueError as error:
                log.warning("the servers' load is unknown: %s", error)
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
        blocks = {BLOCKING + place: seconds for place, seconds in self._watch.take_new_blocks().items()}
        for cause, seconds in {**self.stats.take_waits(), **blocks}.items():
            try:
                await self._job.run.queue.add_wait("agent", cause, seconds)
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


class RunningEpisodes:
    """A task per lease, renewed while it runs, returned at a drain. `ended` is called after each episode."""

    def __init__(self, services: WorkerServices, stats: WorkerStats, ended: Callable[[], None]) -> None:
        self.running: dict[str, tuple[Lease, asyncio.Task[None]]] = {}
        self._episodes: dict[tuple[str, int], Episode] = {}
        """Running episodes, by id and fence."""
        self._services = services
        self._stats = stats
        self._ended = ended

    def __len__(self) -> int:
        return len(self.running)

    def start(self, lease: Lease) -> None:
        """Starts an episode. A run of it under an older lease is cancelled: its result would be refused."""
        if lease.episode_id in self.running:
            self._cancel_lost(self.running[lease.episode_id][0])
        task = asyncio.create_task(self._run(lease), name=lease.episode_id)
        self.running[lease.episode_id] = (lease, task)
        task.add_done_callback(lambda _: self._forget(lease))

    async def renew(self) -> None:
        """Renews all leases; cancels runs whose lease was lost. Raises `QueueError`."""
        leases_by_episode = {episode_id: lease for episode_id, (lease, _) in self.running.items()}
        for leases in _chunks(list(leases_by_episode.values())):
            for episode_id in await self._services.queue.renew(leases):
                lease = leases_by_episode[episode_id]
                episode = self._episodes.get((episode_id, lease.fence))
                # The queue answers an episode that ends itself whether its lease was lost.
                if episode is None or not episode.is_ending:
                    self._cancel_lost(lease)

    async def drain(self) -> None:
        """Cancels every episode; each releases its tools, then its lease is returned with its journal."""
        running = list(self.running.values())
        if not running:
            return
        for _, task in running:
            _cancel_once(task)
        deadline = time.monotonic() + DRAIN_DEADLINE_S
        await asyncio.wait([task for _, task in running], timeout=DRAIN_DEADLINE_S)
        ended = [lease for lease, task in running if task.done() and task.cancelled()]
        for leases in _chunks(ended):
            if time.monotonic() > deadline:
                log.warning("drain deadline reached; the remaining leases expire by themselves")
                break
            await asyncio.gather(*(self._hand_back(lease) for lease in leases))
        log.info("drained: %d of %d episodes stopped", len(ended), len(running))

    # one episode ---------------------------------------------------------------------------------------------------
    async def _run(self, lease: Lease) -> None:
        started = time.monotonic()
        try:
            episode = self._episodes[lease.episode_id, lease.fence] = Episode(self._services, lease)
            outcome = await episode.run()
        except LeaseLost:
            log.warning("episode %s was leased to another worker", lease.episode_id)
            return
        except QueueError as error:
            outcome = Outcome(OutcomeKind.INFRA_ERROR, str(error), "queue")
            if isinstance(error, QueueUnavailable):  # a store without memory refuses a journal, and takes a lease back
                await self._hand_back(lease)
        except Exception as error:
            log.exception("episode %s failed in the worker itself", lease.episode_id)
            outcome = Outcome(OutcomeKind.INFRA_ERROR, repr(error), "worker")
        self._stats.add_episode(outcome, time.monotonic() - started)

    def _forget(self, lease: Lease) -> None:
        """A callback of the task: a task cancelled before its first step runs no code at all."""
        self._episodes.pop((lease.episode_id, lease.fence), None)
        running = self.running.get(lease.episode_id)
        if running is not None and running[0].fence == lease.fence:
            del self.running[lease.episode_id]
        self._ended()

    def _cancel_lost(self, lease: Lease) -> None:
        """Cancels only the run of the lost lease: the episode may have ended, or been leased again, meanwhile."""
        current = self.running.get(lease.episode_id)
        if current is not None and current[0].fence == lease.fence:
            log.warning("lease of %s was lost; cancelling its episode", lease.episode_id)
            _cancel_once(current[1])

    async def _hand_back(self, lease: Lease) -> None:
        """Lost leases are refused by the queue, which is correct."""
        try:
            async with asyncio.timeout(DRAIN_DEADLINE_S / 2):
                await self._services.queue.release(lease)
        except (QueueError, TimeoutError) as error:
            log.warning("lease of %s was not returned (%s); it expires by itself", lease.episode_id, error)


def _cancel_once(task: asyncio.Task[None]) -> None:
    """A second cancellation would interrupt the teardown that the first one began."""
    if not task.cancelling():
        task.cancel()


def _chunks(leases: Sequence[Lease]) -> list[Sequence[Lease]]:
    return [leases[start : start + CHUNK] for start in range(0, len(leases), CHUNK)]
