"""One agent worker process with N episodes at once, watched from inside. Started by agents.py.

python -m benchmarks.support.agents_child REDIS_URL MODEL    (password in PENSTOCK_BENCH_PASSWORD)

    {"episodes", "turns_per_s", "turns_before", "warm_up_s", "seconds"} ──► figures of a worker at work
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.support.child import answer_questions, own_stdout
from benchmarks.support.measure import quantile
from benchmarks.support.slow_world import TOOL_SHARE, Clock, SlowEngine, SlowTool
from penstock.agent_loops import AgentConfig, Worker, WorkerJob, WorkerServices, build_services
from penstock.agent_loops.rewards import RewardFunction
from penstock.common import frozen_start
from penstock.testing import FakeClient
from penstock.tools import ToolConfig
from penstock.transfer_queue import Limits, RedisTransferQueue, RunContext, Task, TransferQueueConfig

GROUP_SIZE = 8
WARM_AT_ONCE, WARM_TURN_S, WARM_GROUPS = 32, 0.02, 15
"""Before anything is counted: every path taken, every cache filled."""
NEARLY_ALL = 0.99
"""Some are always on their way from one wait to the next."""
BEAT_S = 0.01
LEASE_TTL_S, DEADLINE_S = 30.0, 900.0


@dataclass
class Beat:
    """How late the event loop wakes a callback."""

    late_s: list[float] = field(default_factory=list)
    _handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._handle = loop.call_later(BEAT_S, self._beat, time.monotonic() + BEAT_S)

    def _beat(self, due: float) -> None:
        self.late_s.append(max(0.0, time.monotonic() - due))
        self.start()

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()


@dataclass(frozen=True)
class World:
    """A worker's parts, and the clocks that engine and tool sleep by."""

    queue: RedisTransferQueue
    parts: WorkerServices
    engine: SlowEngine
    model_clock: Clock
    tool_clock: Clock

    def take_time(self, turn_s: float) -> None:
        """On average, for model and tool together."""
        self.model_clock.mean_s, self.tool_clock.mean_s = (1 - TOOL_SHARE) * turn_s, TOOL_SHARE * turn_s

    def worker(self, episodes: int) -> Worker:
        config = self.parts.config.model_copy(update={"concurrency": episodes})
        job = WorkerJob("bench", RunContext(self.queue, model="", lease_ttl_s=LEASE_TTL_S), config, self.engine)
        return Worker(job, replace(self.parts, config=config))


async def measure(url: str, password: str, model: str, question: dict[str, Any]) -> dict[str, Any]:
    queue = await RedisTransferQueue.connect(
        url, f"agents-{secrets.token_hex(4)}", TransferQueueConfig(), password=password
    )
    try:
        return await _measure(build_world(queue, model), question)
    finally:
        await queue.drop_run()
        await queue.close()


async def _measure(world: World, question: dict[str, Any]) -> dict[str, Any]:
    await _warm_up(world, _tasks(question))
    world.take_time(question["episodes"] / question["turns_per_s"])
    return await _full_worker(world, question)


async def _warm_up(world: World, tasks: list[Task]) -> None:
    """Run the first tasks to their end, so that no episode of them is taken up later in mid-way; queue the others."""
    limits = Limits(GROUP_SIZE, len(tasks), max_staleness=0, max_bytes=64 << 30, lease_ttl_s=LEASE_TTL_S)
    await world.queue.create_run(limits, "{}")
    await world.queue.submit(tasks[:WARM_GROUPS])
    world.take_time(WARM_TURN_S)
    worker = world.worker(WARM_AT_ONCE)
    async with running(worker):
        await until(lambda: worker.stats.outcomes.total() >= WARM_GROUPS * GROUP_SIZE and not worker.episodes)
    await world.queue.submit(tasks[WARM_GROUPS:])


async def _full_worker(world: World, question: dict[str, Any]) -> dict[str, Any]:
    """Figures of a worker whose episodes are of mixed ages, then of the same when all of them wait."""
    episodes, engine, before = question["episodes"], world.engine, memory()
    worker = world.worker(episodes)
    with frozen_start():
        async with running(worker):
            began, ramp = time.monotonic(), engine.turns + question["turns_before"] * episodes
            await until(lambda: len(worker.episodes) >= NEARLY_ALL * episodes)
            figures = {
                "mean_turn_s": episodes / question["turns_per_s"],
                "started_in_s": round(time.monotonic() - began, 2),
            }
            await until(lambda: engine.turns >= ramp)
            await asyncio.sleep(question["warm_up_s"])
            figures |= await _at_work(engine, question["seconds"])
            world.model_clock.stop()
            await until(lambda: engine.waiting >= NEARLY_ALL * episodes)
            figures |= _waiting(before, engine)
            began = time.monotonic()
    return {**figures, "drained_in_s": round(time.monotonic() - began, 2)}


async def _at_work(engine: SlowEngine, seconds: float) -> dict[str, float]:
    beat, turns = Beat(), engine.turns
    cpu_s, began = time.process_time(), time.monotonic()
    beat.start()
    await asyncio.sleep(seconds)
    beat.stop()
    cpu_s, wall_s, turns = time.process_time() - cpu_s, time.monotonic() - began, engine.turns - turns
    return {
        "turns": turns,
        "turns_per_s": round(turns / wall_s, 1),
        "cpu_ms_per_turn": round(cpu_s / max(turns, 1) * 1e3, 4),
        "cpu_share": round(cpu_s / wall_s, 3),
        "lag_p50_ms": round(quantile(beat.late_s, 0.5) * 1e3, 2),
        "lag_p99_ms": round(quantile(beat.late_s, 0.99) * 1e3, 2),
        "lag_most_ms": round(max(beat.late_s) * 1e3, 1),
    }


def memory() -> int:
    """Resident bytes, garbage collected."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _waiting(before: int, engine: SlowEngine) -> dict[str, Any]:
    """Bytes per episode that waits for the model; `engine` has all of them."""
    now = memory()
    return {
        "waiting": engine.waiting,
        "resident_bytes_per_episode": round((now - before) / engine.waiting),
        "context_tokens_per_episode": round(engine.tokens_waiting / engine.waiting, 1),
        "resident_mb": round(now / 1e6, 1),
    }


# the parts ---------------------------------------------------------------------------------------------------------
def _tasks(question: dict[str, Any]) -> list[Task]:
    """Of more episodes than are needed. All are admitted at once: step 0 would take every group."""
    turns = question["turns_per_s"] * (60 + question["warm_up_s"] + question["seconds"])
    turns += question["turns_before"] * question["episodes"]
    groups = WARM_GROUPS + (question["episodes"] + int(turns)) // GROUP_SIZE + 1
    return [_task(number) for number in range(groups)]


def _task(number: int) -> Task:
    question = f"Question {number}: " + "what does the book say about this and what follows from it? " * 3
    messages = [{"role": "user", "content": question}]
    return Task(f"train/{number:08d}", "train", messages, "bench", "46")


def build_world(queue: RedisTransferQueue, model: str) -> World:
    """A real worker's parts, but for the engine and the tool."""
    config = AgentConfig(max_turns=64, max_new_tokens=256, max_response_tokens=16384, episode_deadline_s=3600)
    model_clock, tool_clock = Clock(seed=1), Clock(seed=2)
    job = WorkerJob("bench", RunContext(queue, model), config, FakeClient(lambda _: ()))
    parts = build_services(job, None)
    engine, tool = SlowEngine(model_clock, parts.chat, seed=3), SlowTool(tool_clock)
    parts = replace(
        parts,
        client=engine,
        tools={tool.name: tool},
        tool_configs={tool.name: ToolConfig(name=tool.name, timeout_s=3600)},
        reward=RewardFunction(_score),
    )
    return World(queue, parts, engine, model_clock, tool_clock)


async def _score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    return float(str(ground_truth) in solution_str)


@asynccontextmanager
async def running(worker: Worker) -> AsyncIterator[None]:
    """For the time of the block, which a worker that fails ends."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(worker.run())
        yield
        task.cancel()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - a worker's own counts: there is no event
            await asyncio.sleep(0.02)


def main() -> None:
    replies = own_stdout()
    url, model = sys.argv[1:]
    password = os.environ["PENSTOCK_BENCH_PASSWORD"]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        answer_questions(replies, lambda question: runner.run(measure(url, password, model, question)))


if __name__ == "__main__":
    main()
