"""One stage: a redis-server, workers, a trainer, the faults that are played on them, and the account at the end.

async with Stage(seed) as stage:
    account = await stage.play(stage.every(0.2, lambda: kill_redis(stage.server, stage.chance), times=4))
account.check()

A worker or trainer that was killed is replaced; one that fails by itself ends the stage.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import redis.asyncio as aioredis

import penstock
from faults.account import Account, draw_up
from faults.havoc import CuttingProxy
from faults.intruders import Intruders, SlowlyLoadedServer
from faults.plan import ANYWHERE, OVERTAKEN, FaultPlan, random_limits
from faults.redis_clock import STEP_KEY, movable_redis_clock
from faults.trainer import FENCED, START_AGAIN
from penstock.transfer_queue import Limits, RedisTransferQueue

PASSWORD = "a-test-password"


class Stage:
    """Owns everything in it; whatever happens, nothing of it is left when it closes.

    `fsync`: the append-only file's. `behind_proxy`: processes reach Redis by `proxy`. `may_lose_tail`, `poison`,
    `movable_clock`, `loses_payloads`: see `FaultPlan`.
    """

    def __init__(
        self,
        seed: int,
        *,
        fsync: str = "always",
        workers: int = 2,
        limits: Limits | None = None,
        behind_proxy: bool = False,
        worker_options: Sequence[str] = (),
        **options: bool,
    ) -> None:
        self.chance = random.Random(seed)
        # Beside the tests' own folder: the path of a unix socket must be short.
        self._folder = Path(tempfile.mkdtemp(prefix="faults-"))
        self.server = SlowlyLoadedServer(
            self._folder / "redis", PASSWORD, appendfsync=fsync, unix_socket=self._folder / "redis.sock"
        )
        self.proxy = CuttingProxy(self.server.url, self._folder / "proxy.sock", self.chance)
        self.plan = FaultPlan(
            folder=self._folder,
            url=self.server.url,
            run=f"faults-{secrets.token_hex(4)}",
            password=PASSWORD,
            seed=seed,
            limits=limits or random_limits(self.chance),
            checkpoint_every=self.chance.randint(1, 4),
            **options,
        )
        way = ["--url", self.proxy.url] if behind_proxy else []
        self.troupe = Troupe(self.plan.save(), self.chance, way)
        self._places = workers
        self._worker_options = worker_options
        self.kills: Counter[str] = Counter()
        """What was done to Redis, by name."""
        self._closing = AsyncExitStack()

    async def __aenter__(self) -> Stage:
        async with AsyncExitStack() as stack:
            stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
            await stack.enter_async_context(self.server)
            await stack.enter_async_context(self.proxy)
            stack.enter_context(movable_redis_clock(enabled=self.plan.movable_clock))
            self.client = aioredis.Redis.from_url(self.server.url, password=PASSWORD, protocol=2)
            stack.push_async_callback(self.client.aclose)
            self.queue = await RedisTransferQueue.connect(self.server.url, self.plan.run, self.plan.config, PASSWORD)
            stack.push_async_callback(self.queue.close)
            await self.queue.create_run(self.plan.limits, "faults: 1")
            self.intruders = Intruders(self.plan, self.queue, self.server)
            stack.push_async_callback(self.troupe.end)
            self._closing = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._closing.aclose()

    async def play(self, *faults: Coroutine[Any, Any, None], gaps: Sequence[str] = ()) -> Account:
        """Work under `faults` and trainers that die in `gaps`; when all are over, drain the work and draw up."""
        async with asyncio.TaskGroup() as group:
            for place in range(self._places):
                group.create_task(self.troupe.keep_worker(place, *self._worker_options))
            beside = self.intruders.watch(lambda: self.troupe.trainer_starts), self.intruders.keep_head()
            watching = [group.create_task(one) for one in beside]
            playing = [group.create_task(self._under_way(fault)) for fault in faults]
            await self.troupe.kill_trainer_in(gaps)
            finishing = group.create_task(self.troupe.finish_training())
            await asyncio.gather(*playing)
            self.plan.finish()
            await finishing  # `watch` ends it if nothing happens any more
            await self.troupe.stop_workers()
            for task in watching:
                task.cancel()
        kills, counts = {**self.kills, **self.troupe.kills}, {**self.intruders.counts, **self.troupe.counts}
        account = await draw_up(self.plan, self.queue, kills, counts, self.intruders.deleted)
        account.wrong += self.intruders.found
        return account

    async def _under_way(self, fault: Coroutine[Any, Any, None]) -> None:
        """Faults begin when the first step is trained."""
        while not (await self.queue.status()).version:
            await asyncio.sleep(0.02)
        await fault

    async def every(self, mean_s: float, fault: Callable[[], Awaitable[object]], *, times: int, name: str = "") -> None:
        """Play a fault `times` times, after random pauses; with a `name` it is counted under that."""
        for _ in range(times):
            await asyncio.sleep(self.chance.uniform(0.3, 1.7) * mean_s)
            await fault()
            if name:
                self.kills[name] += 1

    async def leftovers(self) -> list[str]:
        """Keys that are left when the run is dropped."""
        await self.queue.drop_run()
        await self.client.delete(self.queue._keys.index + STEP_KEY)
        return [key.decode() async for key in self.client.scan_iter(match=f"*{self.plan.run}*", count=1000)]


MOST_PASSES = {"in_checkpoint": 2, "after_checkpoint": 2, "in_commit": 2, "after_commit": 2}
STOP_TIMEOUT_S = 120.0
STOPPED_EARLY = -signal.SIGTERM
"""It was asked to stop before it had begun."""
MOST_STARTS = 30
"""A trainer that was told to start again so often, without a life that trains, will never go on."""


class Troupe:
    """The processes of one stage. `kills` counts what was killed: ``worker``, and ``trainer:GAP``; `counts`:
    ``trainers_fenced``."""

    def __init__(self, plan_file: Path, chance: random.Random, options: Sequence[str]) -> None:
        self._plan_file = plan_file
        self._chance = chance
        self._options = options
        self._workers: dict[int, Process] = {}
        self._trainers: list[Process] = []
        self._stopping = False
        self.kills: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.restarts: Counter[str] = Counter()
        """``worker`` | ``trainer`` → how often one was started again."""

    async def keep_worker(self, place: int, *options: str) -> None:
        """Until `stop_workers`. Raises `ProcessFailed` where one ends by itself."""
        number = 0
        while not self._stopping:
            name = f"worker-{place}-{number}"
            process = await Process.start("worker", self._plan_file, name, *self._options, *options)
            self._workers[place] = process
            if self._stopping:
                process.signal(signal.SIGTERM)
            code = await process.wait()
            if code not in ((0, STOPPED_EARLY, KILLED) if self._stopping else (KILLED,)):
                raise process.failure(code)
            number += 1
        self.restarts["worker"] += number - 1

    async def kill_worker(self) -> None:
        """One that is alive: a place may be between two."""
        while not self._workers[self._chance.choice([*self._workers])].signal(signal.SIGKILL):
            await asyncio.sleep(0.02)
        self.kills["worker"] += 1

    async def stop_workers(self) -> None:
        """Ask them to hand back what they hold."""
        self._stopping = True
        for process in self._workers.values():
            process.signal(signal.SIGTERM)
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await asyncio.gather(*(process.wait() for process in self._workers.values()))

    @property
    def trainer_starts(self) -> int:
        return len(self._trainers)

    async def kill_trainer_in(self, gaps: Sequence[str], *, most_passes: int = 4) -> None:
        """One life for each gap, one after the other, each ending there."""
        for gap in gaps:
            if gap == OVERTAKEN:
                await self._overtake()
                continue
            passes = self._chance.randint(1, MOST_PASSES.get(gap, most_passes))
            await self._until(KILLED, gap, passes)
            self.kills[f"trainer:{gap}"] += 1

    async def _overtake(self) -> None:
        """A second trainer claims the run while the first lives and trains. The first is fenced, the second killed."""
        code = START_AGAIN
        while code == START_AGAIN:
            older = await self._start_trainer()
            waiting = asyncio.create_task(older.wait())
            while not (waiting.done() or (self._plan_file.parent / f"{older.name}.began").exists()):
                await asyncio.sleep(0.05)
            await asyncio.sleep(self._chance.uniform(0, 0.5))
            newer = older
            while not waiting.done():
                newer = await self._start_trainer()
                await asyncio.wait(
                    {waiting, ending := asyncio.create_task(newer.wait())}, return_when=asyncio.FIRST_COMPLETED
                )
                if ending.done() and ending.result() != START_AGAIN:
                    raise newer.failure(ending.result())
            if (code := waiting.result()) not in (START_AGAIN, FENCED):
                raise older.failure(code)
            await asyncio.sleep(self._chance.uniform(0, 0.5))
            await newer.end()
        self.counts["trainers_fenced"] += 1
        self.kills[f"trainer:{OVERTAKEN}"] += 1

    async def finish_training(self) -> None:
        """Until a life says that everything is trained."""
        await self._until(0, "", 1)

    async def _until(self, code: int, gap: str, passes: int) -> None:
        """Lives that are told to start again are no end."""
        for _ in range(MOST_STARTS):
            if await self._trainer_life(gap, passes) == code:
                return
        raise self._trainers[-1].failure(START_AGAIN)

    async def _start_trainer(self, *inside: str) -> Process:
        self.restarts["trainer"] += bool(self._trainers)
        name = f"trainer-{len(self._trainers) + 1}"
        process = await Process.start("trainer", self._plan_file, name, *self._options, *inside)
        self._trainers.append(process)
        return process

    async def _trainer_life(self, gap: str, passes: int) -> int:
        process = await self._start_trainer(
            *(["--gap", gap, "--passes", str(passes)] if gap not in ("", ANYWHERE) else [])
        )
        if gap == ANYWHERE:
            await asyncio.sleep(self._chance.uniform(0.35, 1.5))
            process.signal(signal.SIGKILL)
        code = await process.wait()
        if code not in (START_AGAIN, KILLED if gap else 0):
            raise process.failure(code)
        return code

    async def end(self) -> None:
        """Nobody is left."""
        everyone = [*self._workers.values(), *self._trainers]
        await asyncio.gather(*(process.end() for process in everyone))


TESTS = Path(__file__).resolve().parents[1]
SOURCES = Path(penstock.__file__).resolve().parents[1]
KILLED = -signal.SIGKILL


class ProcessFailed(AssertionError):
    """A process ended in a way that no fault of ours explains."""


class Process:
    """``python -m faults.MODULE PLAN NAME …``; what it prints goes to ``NAME.log``."""

    def __init__(self, name: str, log: Path, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self._log = log
        self._process = process

    @classmethod
    async def start(cls, module: str, plan_file: Path, name: str, *options: str) -> Process:
        log = plan_file.parent / "logs" / f"{name}.log"
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", f"faults.{module}", str(plan_file), name, *options),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "PYTHONPATH": f"{SOURCES}{os.pathsep}{TESTS}"},
            )
        return cls(name, log, process)

    async def wait(self) -> int:
        """Its exit code; negative where a signal ended it."""
        return await self._process.wait()

    def signal(self, number: signal.Signals) -> bool:
        """False where it has ended already."""
        if self._process.returncode is not None:
            return False
        # `send_signal` would reap one that has ended meanwhile, and asyncio would report 255 as its exit code.
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, number)
        return True

    async def end(self) -> None:
        """SIGKILL where it still runs."""
        self.signal(signal.SIGKILL)
        await self._process.wait()

    def failure(self, code: int) -> ProcessFailed:
        return ProcessFailed(f"{self.name} ended with {code}:\n{self._log.read_text(encoding='utf-8')[-4000:]}")
