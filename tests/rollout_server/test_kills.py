"""Random kill -9 of engines and rollout servers under load, with weights changing: no answer is lost or wrong.

PENSTOCK_KILLS says how many (12 by default, 100 promised). Servers, their engines and the queue are real processes;
a killed sidecar is started again by the test, as `penstock run` would, an engine by its sidecar. Afterwards:

- every answer arrived whole,
- every token's logprob is that of a plain forward pass of the weights that its span names,
- every context that an engine was asked with is exactly the prompt and tokens that are in the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.rollout_server.conftest import TOKEN, VOCAB, Reference, check_answer
from tests.rollout_server.routed_mixture import Mixture
from tests.transfer_queue.queue_samples import finish_all, task
from tests.until import until

import penstock
from penstock.rollout_server import GenerateRequest, Generation, RolloutClient, Sampling
from penstock.testing import fake_experts, fake_manifest, next_token
from penstock.transfer_queue import Announcement, Batch, Limits, RedisServer, RedisTransferQueue, TransferQueueConfig

pytestmark = [pytest.mark.crash, pytest.mark.redis, pytest.mark.timeout(1800)]
KILLS = int(os.environ.get("PENSTOCK_KILLS", "12"))
PASSWORD = "a-test-password"
SERVERS = 3
CLIENTS = 24
TOKENS = (24, 120)
ANSWERS_PER_KILL = 4
"""Each kill waits for this many more answers, at most 20 s: killing idle servers would prove nothing."""
SPARE = 8
"""The most further kills, until one interrupts an answer that has begun."""
LIMITS = Limits(group_size=1, groups_per_step=1, max_staleness=1_000)


@pytest.fixture
async def redis(tmp_path: Path) -> AsyncIterator[RedisServer]:
    async with RedisServer(tmp_path / "redis", PASSWORD) as server:
        yield server


class Run:
    """Its queue, its server processes, each started again whenever it has ended, and clients that ask on and on."""

    def __init__(self, kind: str, redis: RedisServer, model: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.name = f"t-{secrets.token_hex(4)}"
        root, script = str(Path(penstock.__file__).parent.parent), str(Path(__file__).with_name("killable_server.py"))
        secret = {"PYTHONPATH": root, "PENSTOCK_REDIS_PASSWORD": PASSWORD, "PENSTOCK_TOKEN": TOKEN}
        self._environment = {**os.environ, **secret}
        self._command = [sys.executable, script, kind]
        self._arguments = [redis.url, self.name, model, str(folder)]
        self.url = redis.url
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.answers: dict[str, tuple[GenerateRequest, Generation]] = {}
        self.killed: Counter[str] = Counter()
        self.published: list[int] = []
        self.ending = False
        self.queue: RedisTransferQueue
        self.client: RolloutClient

    async def supervise(self) -> None:
        while True:
            for name in (f"s{number}" for number in range(SERVERS)):
                process = self.processes.get(name)
                if process is None or process.poll() is not None:
                    with (self.folder / f"{name}.log").open("ab") as log:
                        self.processes[name] = subprocess.Popen(
                            [*self._command, name, *self._arguments], stdout=log, stderr=log, env=self._environment
                        )
            await asyncio.sleep(0.05)

    @contextlib.contextmanager
    def supervised(self) -> Iterator[None]:
        supervising = asyncio.create_task(self.supervise())
        try:
            yield
        finally:
            supervising.cancel()
            for process in self.processes.values():
                process.terminate()
            for process in self.processes.values():
                process.wait(60)

    async def ask_on(self, number: int) -> None:
        """Each answer with a seed of its own."""
        turn = 0
        while not self.ending:
            draw, name = random.Random(f"{number}/{turn}"), f"e{number}/{turn}"
            request = GenerateRequest(
                token_ids=[draw.randrange(VOCAB) for _ in range(draw.randrange(20, 60))],
                sampling=Sampling(max_new_tokens=draw.randint(*TOKENS), seed=1000 * number + turn),
                request_id=name,
                episode_id=f"e{number}",
                routed_experts_from=None if self.kind == "hf" else 0,
            )
            self.answers[name] = (request, await self.client.generate(request))
            turn += 1

    def resumed(self) -> bool:
        """A kill has hit an answer that had begun."""
        return any(answer.resumed for _, answer in self.answers.values())

    def served(self) -> set[int]:
        return {version for _, answer in self.answers.values() for version, _, _ in answer.version_spans}

    async def until_accepting(self, count: int) -> list[str]:
        async with asyncio.timeout(240):
            while len(names := [one.server_id for one in await self.queue.servers() if one.accepting]) < count:
                await asyncio.sleep(0.05)
        return names

    async def kill_one(self, draw: random.Random) -> None:
        """One that serves, at a random moment of its work."""
        wanted = len(self.answers) + ANSWERS_PER_KILL
        with contextlib.suppress(TimeoutError):
            await until(lambda: len(self.answers) >= wanted, 20)
        await asyncio.sleep(draw.uniform(0.0, 0.5))
        names = await self.until_accepting(1)
        what = "sidecar" if self.kind == "fake" else draw.choice(["engine", "sidecar"])
        name = draw.choice(names)
        pid = int((self.folder / f"{name}.pid").read_text()) if what == "engine" else self.processes[name].pid
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self.killed[what] += 1

    async def publish(self, manifest: dict[str, Any]) -> None:
        """As a trainer does: its step was trained on, then its weights are announced."""
        version = len(self.published) + 1
        await self.queue.submit([task(version)])
        await finish_all(self.queue, 1, version - 1)
        assert isinstance(await self.queue.lease_batch(version - 1), Batch)
        assert await self.queue.publish_version(Announcement(version, manifest))
        self.published.append(version)

    async def play(self, write: Callable[[int], dict[str, Any]], kills: int) -> None:
        """Everything up, loaded, killed `kills` times, eight versions published meanwhile; the last answers awaited."""
        self.folder.mkdir()
        self.queue = await RedisTransferQueue.connect(self.url, self.name, TransferQueueConfig(), PASSWORD)
        await self.queue.create_run(LIMITS, "config: 1")
        self.client = RolloutClient(self.queue, TOKEN, timeout_s=600)
        draw, started = random.Random(7), time.monotonic()
        with self.supervised():
            await self.until_accepting(SERVERS)
            asking = [asyncio.create_task(self.ask_on(number)) for number in range(CLIENTS)]
            await until(lambda: bool(self.answers), 240)  # of the version that servers start with
            for number in range(kills):
                if number % max(1, kills // 8) == 0:
                    await self.publish(write(len(self.published) + 1))
                await self.kill_one(draw)
            while not self.resumed() and self.killed.total() < kills + SPARE:
                await self.kill_one(draw)
            await until(lambda: self.published[-1] in self.served())  # the last kill may come before it is loaded
            self.ending = True
            await asyncio.gather(*asking)
        await self.client.close()
        await self.queue.close()
        self.check_whole()
        numbers = {"kills": dict(self.killed), "answers": len(self.answers), "versions": sorted(self.served())}
        print(json.dumps(numbers | {"seconds": round(time.monotonic() - started, 1)}))

    def check_whole(self) -> None:
        for request, answer in self.answers.values():
            check_answer(answer.token_ids, answer.logprobs, answer.version_spans)
            assert len(answer.token_ids) == request.sampling.max_new_tokens
            assert answer.finish_reason == "length"
        assert self.served() <= {0, *self.published}

    def resumptions(self) -> int:
        """How often engines were asked to go on. Every context is the prompt and tokens of the answer."""
        asked, count = defaultdict(list), 0
        for path in self.folder.glob("*.asked"):
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):  # the last line of a killed server
                    entry = json.loads(line)
                    asked[entry["id"]].append(entry["context"])
        for name, (request, answer) in self.answers.items():
            whole = request.token_ids + answer.token_ids
            assert asked[name], name
            for context in asked[name]:
                assert len(context) >= len(request.token_ids)
                assert context == whole[: len(context)], name
                count += len(context) > len(request.token_ids)
        return count


@pytest.mark.deep
async def test_kills_of_engines_and_servers_lose_nothing(
    tiny_model: str, reference: Reference, redis: RedisServer, tmp_path: Path
) -> None:
    run = Run("hf", redis, tiny_model, tmp_path / "servers")
    await run.play(lambda version: reference.publish(version, reference.other(version)).as_dict(), KILLS)
    assert run.killed.total() == KILLS
    assert run.resumptions() > KILLS // 4
    by_version: dict[int, list[tuple[list[int], list[int], list[float]]]] = defaultdict(list)
    for request, answer in run.answers.values():
        for version, start, end in answer.version_spans:
            context = request.token_ids + answer.token_ids[:start]
            by_version[version].append((context, answer.token_ids[start:end], answer.logprobs[start:end]))
    for version, spans in by_version.items():
        reference.use(reference.other(version) if version else reference.first)
        for context, sampled, logprobs in spans:
            assert logprobs == pytest.approx(reference.logprobs(context, sampled), abs=5e-4)
    longest = max((span for spans in by_version.values() for span in spans), key=lambda span: len(span[1]))
    reference.use(reference.other(len(run.published) + 1))
    assert longest[2] != pytest.approx(reference.logprobs(longest[0], longest[1]), abs=0.05), "other weights show"


@pytest.mark.parametrize("kills", [2, pytest.param(max(8, KILLS // 4), marks=pytest.mark.deep)])
async def test_kills_of_servers_lose_nothing(redis: RedisServer, tmp_path: Path, kills: int) -> None:
    """The quick variant: the fake engine's tokens and experts are functions of context and version."""
    run = Run("fake", redis, "fake", tmp_path / "servers")
    await run.play(fake_manifest, kills)
    assert run.resumptions() > 0
    assert {0, run.published[-1]} <= run.served()
    for request, answer in run.answers.values():
        context, versions = list(request.token_ids), list[int]()
        for version, start, end in answer.version_spans:
            for sampled in zip(answer.token_ids[start:end], answer.logprobs[start:end], strict=True):
                assert sampled == next_token(context, version)
                context.append(sampled[0])
                versions.append(version)
        # Experts of every token but the last: of the pass that sampled the next one, of the prompt those of the first.
        passes = [versions[0]] * (len(request.token_ids) - 1) + versions
        expected = np.stack([fake_experts(*pair) for pair in zip(context[:-1], passes, strict=True)])
        np.testing.assert_array_equal(answer.routed_experts, expected)


@pytest.mark.deep
async def test_kills_lose_no_routed_experts(redis: RedisServer, tmp_path: Path) -> None:
    """Each token's experts are those that the routers of the version of its span choose in a plain forward pass, but
    for rounding at the edge between two experts."""
    mixture = Mixture(tmp_path / "mixture", tmp_path / "weights")
    run = Run("mixture", redis, mixture.folder, tmp_path / "servers")
    await run.play(lambda version: mixture.publish(version).as_dict(), KILLS)
    assert run.resumptions() > KILLS // 4
    compared, differ = 0, 0
    for request, answer in run.answers.values():
        assert answer.routed_experts is not None
        assert len(answer.routed_experts) == len(request.token_ids) + len(answer.token_ids) - 1
        assert (answer.routed_experts[..., 0] != answer.routed_experts[..., 1]).all(), "all are known"
        ids, first = request.token_ids + answer.token_ids[:-1], len(request.token_ids) - 1
        for version, start, end in answer.version_spans:
            rows = slice(first + start, first + end)
            found = np.sort(answer.routed_experts[rows], axis=-1)
            compared += found.size
            differ += int((found != np.sort(mixture.chosen(version, ids)[rows], axis=-1)).sum())
    assert differ < compared / 1000
