"""One stage: a redis-server, workers, a trainer, the faults that are played on them, and the account at the end.

async with Stage(folder, seed) as stage:
    account = await stage.play(stage.every(0.2, lambda: kill_redis(stage.server, stage.chance), times=4))
account.check()
"""

from __future__ import annotations

import asyncio
import random
import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import redis.asyncio as aioredis

from faults.account import Account, draw_up
from faults.plan import Plan, random_limits
from faults.proxy import CuttingProxy
from faults.troupe import Troupe
from penstock.transfer_queue import Limits, RedisServer, RedisTransferQueue

PASSWORD = "a-test-password"
DRAIN_TIMEOUT_S = 120.0


class Stage:
    """Owns everything in it; whatever happens, nothing of it is left when it closes.

    `fsync`: the append-only file's. `may_lose_tail`: see `Plan`. `behind_proxy`: processes reach Redis by `proxy`.
    """

    def __init__(
        self,
        seed: int,
        *,
        fsync: str = "always",
        workers: int = 2,
        limits: Limits | None = None,
        may_lose_tail: bool = False,
        behind_proxy: bool = False,
        worker_options: Sequence[str] = (),
    ) -> None:
        self.chance = random.Random(seed)
        # Beside the tests' own folder: the path of a unix socket must be short.
        self._folder = Path(tempfile.mkdtemp(prefix="faults-", dir=_memory() if fsync == "everysec" else None))
        self.server = RedisServer(
            self._folder / "redis", PASSWORD, appendfsync=fsync, unix_socket=self._folder / "redis.sock"
        )
        self.proxy = CuttingProxy(self.server.url, self._folder / "proxy.sock", self.chance)
        self.plan = Plan(
            folder=self._folder,
            url=self.server.url,
            run=f"faults-{secrets.token_hex(4)}",
            password=PASSWORD,
            seed=seed,
            limits=limits or random_limits(self.chance),
            checkpoint_every=self.chance.randint(1, 4),
            may_lose_tail=may_lose_tail,
        )
        options = ["--url", self.proxy.url] if behind_proxy else []
        self.troupe = Troupe(self.plan.save(), self.chance, options)
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
            self.client = aioredis.Redis.from_url(self.server.url, password=PASSWORD, protocol=2)
            stack.push_async_callback(self.client.aclose)
            self.queue = await RedisTransferQueue.connect(self.server.url, self.plan.run, self.plan.config, PASSWORD)
            stack.push_async_callback(self.queue.close)
            await self.queue.create_run(self.plan.limits, "faults: 1")
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
            playing = [group.create_task(self._under_way(fault)) for fault in faults]
            await self.troupe.kill_trainer_in(gaps)
            finishing = group.create_task(self.troupe.finish_training())
            await asyncio.gather(*playing)
            self.plan.finish()
            await self._drain(finishing)
            await self.troupe.stop_workers()
        return await draw_up(self.plan, self.queue, {**self.kills, **self.troupe.kills})

    async def _under_way(self, fault: Coroutine[Any, Any, None]) -> None:
        """Faults begin when the first step is trained."""
        while not (await self.queue.status()).version:
            await asyncio.sleep(0.02)
        await fault

    async def _drain(self, finishing: asyncio.Task[None]) -> None:
        try:
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                await asyncio.shield(finishing)
        except TimeoutError as error:
            raise AssertionError(f"seed {self.plan.seed}: not drained: {await self.queue.status()}") from error

    async def every(self, mean_s: float, fault: Callable[[], Awaitable[object]], *, times: int, name: str = "") -> None:
        """Play a fault `times` times, after random pauses; with a `name` it is counted under that."""
        for _ in range(times):
            await asyncio.sleep(self.chance.uniform(0.3, 1.7) * mean_s)
            await fault()
            if name:
                self.kills[name] += 1

    async def kill_worker(self) -> None:
        self.troupe.kill_worker()

    async def leftovers(self) -> list[str]:
        """Keys that are left when the run is dropped."""
        await self.queue.drop_run()
        return [key.decode() async for key in self.client.scan_iter(match=f"*{self.plan.run}*", count=1000)]


def _memory() -> str | None:
    """Where a sync takes no time. While a disk is busy with one, Redis under ``everysec`` holds back what it has
    acknowledged, and a kill loses it: the one moment that is not promised (docs/transfer_queue.md)."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
