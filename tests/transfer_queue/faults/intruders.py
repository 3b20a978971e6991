"""Who and what meddles with a run from beside it: strangers, a clock that steps, payloads that vanish, a slow Redis.

And the watch that notices a wedge: a run that trains no step while its Redis answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import redis.asyncio as aioredis

from faults.episodes import task_of
from faults.havoc import HOUR_S
from faults.plan import FaultPlan
from faults.redis_clock import STEP_KEY
from penstock.transfer_queue import (
    BadPayload,
    QueueUnavailable,
    RedisServer,
    RedisTransferQueue,
    RunIdentity,
    RunTaken,
)
from penstock.transfer_queue.archive.archive import read_batches
from penstock.transfer_queue.redis.server_config import newest_append_only_file

HEAD, HEAD_TTL_S, HEAD_RENEW_S = "the head", 60.0, 2.0
FILLER, FILLERS_PER_S = "filler", 2000
"""Commands that make the file long: Redis says how far it is after every 1024, which must not be many seconds apart."""
WEDGE_S = 60.0
LOOKS = 100
"""For a payload that may be lost, a tenth of a second apart."""
SLOW_ANSWER_S = 2.0


class Wedged(AssertionError):
    """For a minute in which Redis answered and a trainer lived no step was fixed and no episode ended."""


class SlowlyLoadedServer(RedisServer):
    """A redis-server that can be made to need a given time to load its file."""

    _delay_us = 0

    async def load_for(self, seconds: float) -> None:
        """SIGKILL, and a restart that loads for about so long."""
        await self._fill(round(seconds * FILLERS_PER_S / 1000))
        await self.kill()
        commands = newest_append_only_file(self.directory).read_bytes().count(b"\r\n*")
        self._delay_us = max(1, round(seconds * 1e6 / max(commands, 1)))
        try:
            await self.restart()
        finally:
            self._delay_us = 0

    async def _fill(self, thousands: int) -> None:
        client = aioredis.Redis.from_url(self.url, password=self._options.password, protocol=2)
        try:
            for _ in range(thousands):
                pipeline = client.pipeline(transaction=False)
                for _ in range(1000):
                    pipeline.set(FILLER, "x")
                await pipeline.execute()
            await client.delete(FILLER)
        finally:
            await client.aclose()

    def _write_config(self) -> None:
        super()._write_config()
        if self._delay_us:
            with Path(self.directory / "redis.conf").open("a", encoding="utf-8") as file:
                file.write(f"\nkey-load-delay {self._delay_us}\n")


class Intruders:
    """Each method is one fault. `found`: what is wrong.

    `counts`: ``strangers_refused``, ``clock_steps``, ``payloads_deleted``, ``logs_cut``, ``loads``, ``loaded_s``.
    """

    def __init__(self, plan: FaultPlan, queue: RedisTransferQueue, server: SlowlyLoadedServer) -> None:
        self._plan = plan
        self._queue = queue
        self._server = server
        self._chance = random.Random(f"{plan.seed}/intruders")
        self.counts: Counter[str] = Counter()
        self.found: list[str] = []
        self.deleted: set[str] = set()
        """Episodes whose payload was deleted."""

    async def keep_head(self) -> None:
        """The run's own head. Until cancelled."""
        while True:
            if (other := await self._queue.claim_head(HEAD, HEAD_TTL_S)) is not None:
                self.found.append(f"{other.holder} took the run from its head")
            await asyncio.sleep(HEAD_RENEW_S)

    async def second_head(self) -> None:
        """It has the run's name and limits, and another recipe; then it has the recipe too."""
        plan, name = self._plan, f"stranger-{secrets.token_hex(4)}"
        stranger = await RedisTransferQueue.connect(plan.url, plan.run, plan.config, plan.password)
        try:
            refused = False
            try:
                await stranger.create_run(plan.limits, "faults: 2", RunIdentity(name, "another", "another"))
            except RunTaken as error:
                refused = name in str(error)
            head = await stranger.claim_head(name, HEAD_TTL_S)
            if refused and head is not None and head.holder == HEAD:
                self.counts["strangers_refused"] += 1
            else:
                self.found.append(f"{name} entered the run: refused by its recipe {refused}, found the head {head}")
        finally:
            await stranger.close()

    async def step_clock(self) -> None:
        """Redis's own clock, by up to an hour, forward or back."""
        step = self._chance.choice([0, round(self._chance.uniform(-HOUR_S, HOUR_S))])
        await self._queue._connection.command("SET", self._queue._keys.index + STEP_KEY, step)
        self.counts["clock_steps"] += 1

    async def lose_payload(self, client: aioredis.Redis) -> None:
        """One payload of a group that can spare it: a step that loses every group ends its run."""
        prefix = self._queue._keys.payload("")
        for _ in range(LOOKS):
            try:
                keys = sorted([key.decode() async for key in client.scan_iter(match=prefix + "*", count=1000)])
            except (aioredis.RedisError, OSError):  # it is down; the next answer counts
                keys = []
            if spare := self._spare({key: key.removeprefix(prefix).partition("@")[0] for key in keys}):
                key, episode = self._chance.choice(spare)
                self.deleted.add(episode)
                self.counts["payloads_deleted"] += await self._queue._connection.command("UNLINK", key)
                return
            await asyncio.sleep(0.1)

    def _spare(self, episodes: Mapping[str, str]) -> list[tuple[str, str]]:
        """Of key → episode, those of groups that hold two more payloads and have lost none."""
        held = Counter(task_of(episode) for episode in episodes.values())
        before = {task_of(episode) for episode in self.deleted}
        return [
            (key, episode)
            for key, episode in episodes.items()
            if held[task_of(episode)] >= 3 and task_of(episode) not in before
        ]

    async def cut_log(self) -> None:
        """One file of the archive is gone or ends early: a trainer that replays its step finds no episode of it."""
        for _ in range(LOOKS):
            for path in sorted((self._plan.folder / "archive" / "batches").glob("*.parquet"), reverse=True):
                with contextlib.suppress(FileNotFoundError, BadPayload):  # committed meanwhile; cut before
                    episodes = read_batches(path, ["episode"])["episode"].to_pylist()
                    path.unlink() if self._chance.random() < 0.5 else os.truncate(path, path.stat().st_size - 1)
                    self.deleted |= set(episodes)
                    self.counts["logs_cut"] += 1
                    return
            await asyncio.sleep(0.1)

    async def load_for_long(self, seconds: float) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        await self._server.load_for(seconds)
        self.counts["loads"] += 1
        self.counts["loaded_s"] += round(clock() - began)

    async def watch(self, trainer_starts: Callable[[], int]) -> None:
        """Raises `Wedged`. Until cancelled. A trainer that was killed has its minute anew, and so has a run in which an
        episode ended: on a machine with much else to do a step may take longer than a minute."""
        clock = asyncio.get_running_loop().time
        newest, idle_s, asked_at = (-1, 0, 0), 0.0, clock()
        while True:
            await asyncio.sleep(1.0)
            before = clock()
            try:
                status = await self._queue.status()
            except QueueUnavailable:
                asked_at = clock()
                continue
            if clock() - before < SLOW_ANSWER_S:
                idle_s += before - asked_at
            asked_at = clock()
            if (reached := (status.step, status.episodes["completed"], trainer_starts())) != newest:
                newest, idle_s = reached, 0.0
            if idle_s > WEDGE_S:
                raise Wedged(f"seed {self._plan.seed}: no step after {newest[0]} for {idle_s:.0f} s: {status}")
