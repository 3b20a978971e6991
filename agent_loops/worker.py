"""An agent worker: one asyncio process that keeps up to `concurrency` episodes running.

task         consumes                waits for                        woken by
admit        client.best_version,    room; a server; admission        an episode's end; its own back-off
             ledger.lease_episodes
episode × N  one lease               model, tools, reward             (see episode.py)
renew        leases held             a third of the lease's TTL       the clock; cancels episodes that were lost
adapt        client.servers, 429s    ADAPT_S                          the clock; wakes admit (concurrency.py)
report       waits, counts           REPORT_S                         the clock
watch        the loop's beat         a thread of its own              names code that blocks the loop (loop_watch.py)

Shutdown, healthy (cancellation): admission stops, episodes are cancelled, give back their tools and hand their leases
back with their journals, within DRAIN_DEADLINE_S. Crashed (kill -9): leases run out and other workers go on from the
journals. Either way nothing that was sampled is lost.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path

from penstock.agent_loops.chat import chat_of
from penstock.agent_loops.client import GenerateClient
from penstock.agent_loops.concurrency import ADAPT_S, Bounds, Concurrency, WatchedClient
from penstock.agent_loops.config import AgentConfig
from penstock.agent_loops.episode import Episode, EpisodeParts
from penstock.agent_loops.errors import WorkerStopped
from penstock.agent_loops.load import allow_imports_from
from penstock.agent_loops.loop_watch import LoopWatch
from penstock.agent_loops.registry import find_loop
from penstock.agent_loops.reward import load_reward, may_need_sandbox
from penstock.agent_loops.stats import WorkerStats
from penstock.sandbox.config import SandboxConfig
from penstock.sandbox.make import make_sandbox
from penstock.sandbox.protocol import Sandbox, SandboxError
from penstock.tools.config import ToolConfig
from penstock.tools.registry import close_tools, configs_of, make_tools
from penstock.transfer_queue.ledger import Lease, LeaseLost, Ledger, LedgerError
from penstock.transfer_queue.trajectory import Outcome, OutcomeKind

DRAIN_DEADLINE_S = 10.0
BACK_OFF_S = (0.05, 0.2)
"""First and longest pause while the ledger admits nothing, before jitter."""
GATHER_S = 0.005
"""After an episode ends, others are given this long to end too, so that one round trip leases several."""
REPORT_S = 5.0
NO_SERVER_DEADLINE_S = 900.0
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """Everything one agent worker is told. The ledger and the client stay their opener's to close."""

    name: str
    """Unique in the run; named in leases and logs."""
    config: AgentConfig
    ledger: Ledger
    client: GenerateClient
    model: str
    """Folder or hub name of the tokenizer."""
    tools: list[ToolConfig] = field(default_factory=list)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    seed: int = 0
    """Of back-off jitter; sampling is seeded at the servers."""
    recipe_dir: Path = Path()
    """Where files named in the recipe are looked for first."""
    lease_ttl_s: float = 15.0
    sandbox_token: str | None = None
    """Bearer token of a remote sandbox server."""
    max_failures_in_a_row: int = 20
    server_slots: int = 0
    """Requests that a rollout server decodes together; 0: not known."""


async def run_worker(job: WorkerJob) -> None:
    """Run episodes until cancelled.

    Raises `AgentError` (recipe, template), `SandboxError` (no box can be made), `WorkerStopped` and `LedgerError`.
    """
    sandbox = _sandbox_of(job)
    parts: EpisodeParts | None = None
    try:
        parts = build_parts(job, sandbox)
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
    try:
        needed = job.tools or may_need_sandbox(job.config)
        return make_sandbox(job.sandbox, job.name, job.sandbox_token) if needed else None
    except SandboxError as error:
        if job.tools:
            raise
        log.warning("no sandbox for rewards: %s", error)
        return None


def build_parts(job: WorkerJob, sandbox: Sandbox | None) -> EpisodeParts:
    """What a worker's episodes share, checked before the first lease: template, tools, loop, reward."""
    allow_imports_from(job.recipe_dir.resolve())
    tools = make_tools(job.tools, sandbox)
    chat = chat_of(job.model, job.config)
    proof = chat.prove([tool.schema for tool in tools.values()])
    log.info(
        "chat template proven on %d conversations; %s", proof.conversations, proof.summary(job.config.thinking_history)
    )
    find = lru_cache(partial(find_loop, recipe_dir=job.recipe_dir))
    find(job.config.loop)
    return EpisodeParts(
        worker=job.name,
        config=job.config,
        ledger=job.ledger,
        client=job.client,
        chat=chat,
        tools=tools,
        tool_configs=configs_of(tools),
        find_loop=find,
        sandbox=sandbox,
        on_lost=job.sandbox.on_lost,
        reward=load_reward(job.config, job.recipe_dir, sandbox),
    )


class Worker:
    """The process's one loop. `run` is called once."""

    def __init__(self, job: WorkerJob, parts: EpisodeParts) -> None:
        self.stats = WorkerStats()
        self._job = job
        self._parts = replace(parts, worker=job.name)
        self.concurrency = Concurrency(_bounds(job))
        self._watch = LoopWatch()
        self._running: dict[str, tuple[Lease, asyncio.Task[None]]] = {}
        self._room = asyncio.Event()
        self._random = random.Random(f"{job.seed}/{job.name}")
        self._pause_s = BACK_OFF_S[0]
        self._server_seen = time.monotonic()

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
            await self._drain()
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            self._watch.stop()
            await self._flush()

    # admission -----------------------------------------------------------------------------------------------------
    async def _admit(self) -> None:
        """One look at the ledger, or one wait for room."""
        free = self.concurrency.limit - len(self._running)
        if free <= 0:
            self._room.clear()
            await self._room.wait()
            await asyncio.sleep(GATHER_S)
            return
        version = await self._job.client.best_version()
        leases = await self._job.ledger.lease_episodes(self._job.name, free, version) if version is not None else []
        for lease in leases:
            self._start(lease)
        self._server_seen = time.monotonic() if version is not None else self._server_seen
        if leases:
            self._pause_s = BACK_OFF_S[0]
        else:
            await self._back_off("server" if version is None else "admission", free)

    def _start(self, lease: Lease) -> None:
        task = asyncio.create_task(self._run_episode(lease), name=lease.episode_id)
        self._running[lease.episode_id] = (lease, task)
        task.add_done_callback(lambda _: self._forget(lease))

    async def _back_off(self, cause: str, free: int) -> None:
        pause_s = self._pause_s * self._random.uniform(0.75, 1.25)
        self._pause_s = min(self._pause_s * 1.5, BACK_OFF_S[1])
        self.stats.add_wait(cause, pause_s * free / self._job.config.concurrency)
        await asyncio.sleep(pause_s)

    # episodes ------------------------------------------------------------------------------------------------------
    async def _run_episode(self, lease: Lease) -> None:
        started = time.monotonic()
        try:
            outcome = await Episode(self._parts, lease).run()
            self.stats.add_episode(outcome, time.monotonic() - started)
        except LeaseLost:
            log.warning("episode %s went to another worker", lease.episode_id)
        except LedgerError as error:
            self.stats.add_episode(Outcome(OutcomeKind.INFRA_ERROR, str(error), "ledger"), time.monotonic() - started)
        except Exception as error:
            log.exception("episode %s failed in the worker itself", lease.episode_id)
            self.stats.add_episode(Outcome(OutcomeKind.INFRA_ERROR, repr(error), "worker"), time.monotonic() - started)

    def _forget(self, lease: Lease) -> None:
        """A callback of the task, not its last line: a task cancelled before its first step runs no line at all."""
        held = self._running.get(lease.episode_id)
        if held is not None and held[0].fence == lease.fence:
            del self._running[lease.episode_id]
        self._room.set()

    async def _drain(self) -> None:
        """Every episode gives its tools back first, then its lease goes back with its journal."""
        running = list(self._running.values())
        for _, task in running:
            task.cancel()
        if not running:
            return
        await asyncio.wait([task for _, task in running], timeout=DRAIN_DEADLINE_S)
        ended = [lease for lease, task in running if task.done() and task.cancelled()]
        await asyncio.gather(*(self._hand_back(lease) for lease in ended))
        log.info("drained: %d of %d episodes handed back", len(ended), len(running))

    async def _hand_back(self, lease: Lease) -> None:
        """A lease that is lost by now is refused, and that is right."""
        try:
            async with asyncio.timeout(DRAIN_DEADLINE_S / 2):
                await self._job.ledger.release(lease)
        except (LedgerError, TimeoutError) as error:
            log.warning("lease of %s was not handed back (%s); it runs out by itself", lease.episode_id, error)

    # keepers -------------------------------------------------------------------------------------------------------
    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._job.lease_ttl_s / 3)
            held = {episode_id: lease for episode_id, (lease, _) in self._running.items()}
            lost = await self._job.ledger.renew(list(held.values())) if held else []
            for episode_id in lost:
                self._cancel_lost(episode_id, held[episode_id])

    def _cancel_lost(self, episode_id: str, lease: Lease) -> None:
        """Only the run that held the lost lease: the episode may have ended, or been leased anew, meanwhile."""
        current = self._running.get(episode_id)
        if current is not None and current[0].fence == lease.fence:
            log.warning("lease of %s was lost; stopping it", episode_id)
            current[1].cancel()

    async def _adapt(self) -> None:
        """With a client that does not tell how its servers are, the limit stays."""
        client = self._job.client
        while isinstance(client, WatchedClient):
            await asyncio.sleep(ADAPT_S)
            try:
                servers = await client.servers()
            except LedgerError as error:
                log.warning("the servers' load is not known: %s", error)
                continue
            before = self.concurrency.limit
            limit = self.concurrency.saw(servers, client.refused, len(self._running), time.monotonic())
            if limit > before:
                self._room.set()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            await self._flush()
            line, lag_s = self.stats.line(len(self._running)), self._watch.take_longest_s()
            log.info("%s: %s; limit %d, loop lag %.3f s", self._job.name, line, self.concurrency.limit, lag_s)

    async def _flush(self) -> None:
        for cause, seconds in self.stats.take_waits().items():
            try:
                await self._job.ledger.add_wait("agent", cause, seconds)
            except LedgerError as error:
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


def _bounds(job: WorkerJob) -> Bounds:
    """Half of what a server may hold before it counts as loaded is decoded at once; the other half waits there."""
    given = job.config.server_requests
    requests = 2 * job.server_slots if given is None else given
    return Bounds(job.config.concurrency, requests, job.config.server_tokens)


def _raise_from(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done():
            task.result()
