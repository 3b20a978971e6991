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
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
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


class Servers:
    """Server processes, each started again whenever it has ended."""

    def __init__(self, kind: str, redis: RedisServer, run: str, model: str, folder: Path) -> None:
        self.names = [f"s{number}" for number in range(SERVERS)]
        self.folder = folder
        root = str(Path(penstock.__file__).parent.parent)
        self._environment = {
            **os.environ, "PYTHONPATH": root, "PENSTOCK_REDIS_PASSWORD": PASSWORD, "PENSTOCK_TOKEN": TOKEN
        }  # fmt: skip
        script = str(Path(__file__).with_name("killable_server.py"))
        self._commands = {n: [sys.executable, script, kind, n, redis.url, run, model, str(folder)] for n in self.names}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    async def supervise(self) -> None:
        while True:
            for name in self.names:
                process = self.processes.get(name)
                if process is None or process.poll() is not None:
                    self.processes[name] = self._start(name)
            await asyncio.sleep(0.05)

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(self._commands[name], stdout=log, stderr=log, env=self._environment)

    def kill(self, name: str, *, engine: bool) -> None:
        pid = int((self.folder / f"{name}.pid").read_text()) if engine else self.processes[name].pid
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.wait(60)

    def asked(self) -> dict[str, list[list[int]]]:
        """Request id → the contexts that engines were asked with, of all servers."""
        found = defaultdict(list)
        for path in self.folder.glob("*.asked"):
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):  # the last line of a killed server
                    entry = json.loads(line)
                    found[entry["id"]].append(entry["context"])
        return found


@contextlib.contextmanager
def running(servers: Servers) -> Iterator[None]:
    supervising = asyncio.create_task(servers.supervise())
    try:
        yield
    finally:
        supervising.cancel()
        servers.stop()


@dataclass
class Load:
    """Clients that ask on and on, each answer with a seed of its own."""

    client: RolloutClient
    routed: bool = False
    """Answers come with the experts that read each token."""
    ending: bool = False
    answers: dict[str, tuple[GenerateRequest, Generation]] = field(default_factory=dict)

    def resumed(self) -> bool:
        """A kill has hit an answer that had begun."""
        return any(answer.resumed for _, answer in self.answers.values())

    async def ask_on(self, number: int) -> None:
        turn = 0
        while not self.ending:
            draw = random.Random(f"{number}/{turn}")
            name = f"e{number}/{turn}"
            request = GenerateRequest(
                token_ids=[draw.randrange(VOCAB) for _ in range(draw.randrange(20, 60))],
                sampling=Sampling(max_new_tokens=draw.randint(*TOKENS), seed=1000 * number + turn),
                request_id=name,
                episode_id=f"e{number}",
                routed_experts_from=0 if self.routed else None,
            )
            self.answers[name] = (request, await self.client.generate(request))
            turn += 1


@pytest.fixture
async def redis(tmp_path: Path) -> AsyncIterator[RedisServer]:
    async with RedisServer(tmp_path / "redis", PASSWORD) as server:
        yield server


@dataclass
class Scene:
    """One run: its queue, its servers, and who asks them."""

    queue: RedisTransferQueue
    servers: Servers
    load: Load
    killed: Counter[str] = field(default_factory=Counter)
    published: list[int] = field(default_factory=list)

    async def accepting(self) -> list[str]:
        return [server.server_id for server in await self.queue.servers() if server.accepting]

    async def until_accepting(self, count: int) -> list[str]:
        async with asyncio.timeout(240):
            while len(names := await self.accepting()) < count:
                await asyncio.sleep(0.05)
        return names

    async def until_first_answer(self) -> None:
        """Of the version that servers start with: nothing is published before it."""
        async with asyncio.timeout(240):
            while not self.load.answers:
                await asyncio.sleep(0.05)

    async def until_answered(self, count: int) -> None:
        deadline = time.monotonic() + 20
        while len(self.load.answers) < count and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    async def until_served(self, version: int) -> None:
        """By some answer: the last kill may come before any server has loaded the last version."""

        def served() -> bool:
            answers = [answer for _, answer in self.load.answers.values()]
            return any(span[0] >= version for answer in answers for span in answer.version_spans)

        await until(served)

    async def kill_one(self, draw: random.Random, *, engines: bool) -> None:
        """One that serves, at a random moment of its work."""
        await self.until_answered(len(self.load.answers) + ANSWERS_PER_KILL)
        await asyncio.sleep(draw.uniform(0.0, 0.5))
        names = await self.until_accepting(1)
        what = draw.choice(["engine", "sidecar"]) if engines else "sidecar"
        self.servers.kill(draw.choice(names), engine=what == "engine")
        self.killed[what] += 1

    async def publish(self, version: int, manifest: dict[str, Any]) -> None:
        """What a trainer does: its step was trained on, then its weights are announced."""
        await self.queue.submit([task(version)])
        await finish_all(self.queue, 1, version - 1)
        assert isinstance(await self.queue.lease_batch(version - 1), Batch)
        assert await self.queue.publish_version(Announcement(version, manifest))
        self.published.append(version)


async def play(kind: str, redis: RedisServer, model: str, folder: Path, write: Any, kills: int) -> tuple[Scene, float]:
    """Everything up, loaded, killed `kills` times, eight versions published meanwhile; the last answers awaited."""
    folder.mkdir()
    run = f"t-{secrets.token_hex(4)}"
    queue = await RedisTransferQueue.connect(redis.url, run, TransferQueueConfig(), PASSWORD)
    await queue.create_run(LIMITS, "config: 1")
    load = Load(RolloutClient(queue, TOKEN, timeout_s=600), routed=kind != "hf")
    scene = Scene(queue, Servers(kind, redis, run, model, folder), load)
    draw, started = random.Random(7), time.monotonic()
    with running(scene.servers):
        await scene.until_accepting(SERVERS)
        asking = [asyncio.create_task(load.ask_on(number)) for number in range(CLIENTS)]
        await scene.until_first_answer()
        for number in range(kills):
            if number % max(1, kills // 8) == 0:
                version = len(scene.published) + 1
                await scene.publish(version, write(version))
            await scene.kill_one(draw, engines=kind != "fake")
        while not load.resumed() and scene.killed.total() < kills + SPARE:
            await scene.kill_one(draw, engines=kind != "fake")
        await scene.until_served(scene.published[-1])
        load.ending = True
        await asyncio.gather(*asking)
    await load.client.close()
    await queue.close()
    return scene, time.monotonic() - started


def check_contexts(scene: Scene) -> int:
    """How often engines were asked to go on with an answer. Every context is the prompt and tokens of the answer."""
    asked, resumptions = scene.servers.asked(), 0
    for name, (request, answer) in scene.load.answers.items():
        whole = request.token_ids + answer.token_ids
        assert asked[name], name
        for context in asked[name]:
            assert len(context) >= len(request.token_ids)
            assert context == whole[: len(context)], name
        resumptions += sum(len(context) > len(request.token_ids) for context in asked[name])
    return resumptions


def check_whole(scene: Scene) -> None:
    for request, answer in scene.load.answers.values():
        check_answer(answer.token_ids, answer.logprobs, answer.version_spans)
        assert len(answer.token_ids) == request.sampling.max_new_tokens
        assert answer.finish_reason == "length"


def report(scene: Scene, seconds: float, resumptions: int, checked: int) -> None:
    answers = [answer for _, answer in scene.load.answers.values()]
    versions = sorted({version for answer in answers for version, _, _ in answer.version_spans})
    print(json.dumps({
        "kills": dict(scene.killed), "answers": len(answers), "lost": 0,
        "tokens": sum(len(a.token_ids) for a in answers),
        "resumed": sum(answer.resumed for answer in answers), "resumptions_asked": resumptions, "versions": versions,
        "tokens_checked": checked, "seconds": round(seconds, 1),
    }))  # fmt: skip


@pytest.mark.deep
async def test_kills_of_engines_and_servers_lose_nothing(
    tiny_model: str, reference: Reference, redis: RedisServer, tmp_path: Path
) -> None:
    def write(version: int) -> dict[str, Any]:
        return reference.publish(version, reference.other(version)).as_dict()

    scene, seconds = await play("hf", redis, tiny_model, tmp_path / "servers", write, KILLS)
    check_whole(scene)
    resumptions = check_contexts(scene)
    assert sum(scene.killed.values()) == KILLS
    assert resumptions > KILLS // 4
    checked = check_logprobs(scene, reference)
    report(scene, seconds, resumptions, checked)


def check_logprobs(scene: Scene, reference: Reference) -> int:
    """Tokens compared: all of them, span by span, with the weights that the span names; others would be seen."""
    by_version: dict[int, list[tuple[list[int], list[int], list[float]]]] = defaultdict(list)
    for request, answer in scene.load.answers.values():
        for version, start, end in answer.version_spans:
            context = request.token_ids + answer.token_ids[:start]
            by_version[version].append((context, answer.token_ids[start:end], answer.logprobs[start:end]))
    assert set(by_version) <= {0, *scene.published}
    checked = 0
    for version, spans in by_version.items():
        reference.use(reference.other(version) if version else reference.first)
        for context, sampled, logprobs in spans:
            assert logprobs == pytest.approx(reference.logprobs(context, sampled), abs=5e-4)
            checked += len(sampled)
    longest = max((span for spans in by_version.values() for span in spans), key=lambda span: len(span[1]))
    reference.use(reference.other(len(scene.published) + 1))
    assert longest[2] != pytest.approx(reference.logprobs(longest[0], longest[1]), abs=0.05)
    return checked


@pytest.mark.parametrize("kills", [2, pytest.param(max(8, KILLS // 4), marks=pytest.mark.deep)])
async def test_kills_of_servers_lose_nothing(redis: RedisServer, tmp_path: Path, kills: int) -> None:
    """The quick variant: the fake engine's tokens are a function of context and version."""

    scene, seconds = await play("fake", redis, "fake", tmp_path / "servers", fake_manifest, kills)
    check_whole(scene)
    resumptions = check_contexts(scene)
    assert resumptions > 0
    served = {version for _, answer in scene.load.answers.values() for version, _, _ in answer.version_spans}
    assert {0, scene.published[-1]} <= served <= {0, *scene.published}
    checked = 0
    for request, answer in scene.load.answers.values():
        context = list(request.token_ids)
        for version, start, end in answer.version_spans:
            for position in range(start, end):
                token, logprob = next_token(context, version)
                assert (answer.token_ids[position], answer.logprobs[position]) == (token, logprob)
                context.append(token)
                checked += 1
        check_fake_routes(request, answer)
    report(scene, seconds, resumptions, checked)


def check_fake_routes(request: GenerateRequest, answer: Generation) -> None:
    """Of every token but the last: of the pass that sampled the next one, and of the prompt of the first such pass."""
    versions = [version for version, start, end in answer.version_spans for _ in range(start, end)]
    whole = request.token_ids + answer.token_ids[:-1]
    passes = [versions[0]] * (len(request.token_ids) - 1) + versions
    assert answer.routed_experts is not None
    expected = np.stack([fake_experts(token, version) for token, version in zip(whole, passes, strict=True)])
    np.testing.assert_array_equal(answer.routed_experts, expected)


@pytest.mark.deep
async def test_kills_lose_no_routed_experts(redis: RedisServer, tmp_path: Path) -> None:
    """Of a mixture in the hf engine, with weights changing: each token's experts are those that the routers of the
    version of its span choose in a plain forward pass, but for rounding at the edge between two experts."""
    mixture = Mixture(tmp_path / "mixture", tmp_path / "weights")

    def write(version: int) -> dict[str, Any]:
        return mixture.publish(version).as_dict()

    scene, seconds = await play("mixture", redis, mixture.folder, tmp_path / "servers", write, KILLS)
    check_whole(scene)
    resumptions = check_contexts(scene)
    assert resumptions > KILLS // 4
    compared, differ = 0, 0
    for request, answer in scene.load.answers.values():
        assert answer.routed_experts is not None
        assert len(answer.routed_experts) == len(request.token_ids) + len(answer.token_ids) - 1
        assert (answer.routed_experts[..., 0] != answer.routed_experts[..., 1]).all(), "all are known"
        ids = request.token_ids + answer.token_ids[:-1]
        for version, start, end in answer.version_spans:
            first = len(request.token_ids) - 1
            found = np.sort(answer.routed_experts[first + start : first + end], axis=-1)
            expected = np.sort(mixture.chosen(version, ids)[first + start : first + end], axis=-1)
            compared += found.size
            differ += int((found != expected).sum())
    assert differ < compared / 1000
    report(scene, seconds, resumptions, compared)
