"""Adapters of a real peft model on real rollout servers: sidecar, engine, client. Each server is started once."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from tests.rollout_server.conformance.subject import ENGINES, PROMPT
from tests.rollout_server.conftest import (
    TOKEN,
    Reference,
    RunningServer,
    StubQueue,
    rollout_server,
    skip_without,
    small_config,
)

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from tests.rollout_server.peft_policy import PeftPolicy

from penstock.rollout_server import (
    GenerateRequest,
    Generation,
    RolloutClient,
    Sampling,
)
from penstock.rollout_server.engines import make_engine
from penstock.transfer_queue import Announcement
from penstock.weight_sync import FileServer, WeightPublisher

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600, func_only=True)]
TOLERANCE = 2e-4
"""The engine adds B·A to the weights, the peft model to the activations: sums in another order."""


@dataclass
class Subject:
    """A server under test, what it is sent, and who asks it."""

    server: RunningServer
    client: RolloutClient
    publisher: WeightPublisher
    full_bytes: int
    """Of the model folder."""
    versions: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def publish(self, policy: PeftPolicy) -> dict[str, Any]:
        found = self.publisher.write_adapter(next(self.versions), policy.tensors().items(), policy.config())
        return found.as_dict()

    def announce(self, manifest: dict[str, Any]) -> int:
        self.server.queue.announced = Announcement(manifest["version"], manifest)
        version: int = manifest["version"]
        return version

    async def load(self, manifest: dict[str, Any]) -> int:
        version = self.announce(manifest)
        await self.server.until(lambda: self.server.queue.registered["s0"].version == version)
        return version

    async def ask(self, count: int = 16, temperature: float = 0.0) -> Generation:
        sampling = Sampling(max_new_tokens=count, temperature=temperature)
        return await self.client.generate(GenerateRequest(token_ids=PROMPT, sampling=sampling))

    async def cause(self) -> str:
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60) as client:
            answer = await client.get(f"{self.server.url}/health")
        assert answer.json()["ok"], answer.text
        cause: str = answer.json()["cause"]
        return cause


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES)
async def subject(
    request: pytest.FixtureRequest, tiny_model: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Subject]:
    name: str = request.param
    await skip_without(name)
    config = small_config(engine=name, max_model_len=2048, start_timeout_s=300.0)
    folder = tmp_path_factory.mktemp("adapters")
    publisher = WeightPublisher(folder / "published", "shm", keep=4, model=Path(tiny_model))
    queue = StubQueue()
    async with rollout_server(queue, folder, config=config, model=tiny_model, new_engine=make_engine) as server:
        client = RolloutClient(queue, TOKEN, timeout_s=60)
        yield Subject(server, client, publisher, (Path(tiny_model) / "model.safetensors").stat().st_size)
        await client.close()


@pytest.fixture
def policy(tiny_model: str) -> PeftPolicy:
    return PeftPolicy(tiny_model)


async def check_answers(subject: Subject, policy: PeftPolicy, version: int) -> list[float]:
    """That the server samples from the peft model as it is now; returns the logprobs of its greedy answer."""
    greedy = await subject.ask()
    assert greedy.version_spans == [(version, 0, 16)]
    assert greedy.token_ids == policy.greedy(PROMPT, 16)
    sampled = await subject.ask(64, temperature=1.0)
    assert sampled.logprobs == pytest.approx(policy.logprobs(PROMPT, sampled.token_ids), abs=TOLERANCE)
    return greedy.logprobs


async def test_each_adapter_changes_what_is_sampled_and_replaces_the_one_before(
    subject: Subject, policy: PeftPolicy
) -> None:
    answers = [(await subject.ask()).logprobs]
    for seed in range(3):
        policy.train(3, seed)
        manifest = subject.publish(policy)
        assert len(manifest["tensors"]) == 2 * 7 * 2  # lora_A and lora_B of 7 layers of 2 blocks, nothing else
        # r = 8 in layers of 64 to 192: a third of this tiny model; test_adapter has a wide one.
        assert manifest["bytes"] / subject.full_bytes < 0.35
        answers.append(await check_answers(subject, policy, await subject.load(manifest)))
    for one, other in itertools.combinations(answers, 2):
        assert one != pytest.approx(other, abs=10 * TOLERANCE)
    assert subject.server.queue.reported[-1].version == manifest["version"]


async def test_requests_in_flight_go_on_over_an_adapter(subject: Subject, policy: PeftPolicy) -> None:
    before = copy.deepcopy(policy)
    old = await subject.load(subject.publish(policy))
    policy.train(2, seed=9)
    manifest = subject.publish(policy)
    long = asyncio.create_task(subject.ask(1900, temperature=1.0))
    await subject.server.until(lambda: subject.server.queue.registered["s0"].in_flight > 0)
    new = await subject.load(manifest)
    answer = await long
    assert [version for version, _, _ in answer.version_spans] == [old, new]
    swap = answer.version_spans[1][1]
    expected = before.logprobs(PROMPT, answer.token_ids[:swap])
    assert answer.logprobs[:swap] == pytest.approx(expected, abs=TOLERANCE)
    await check_answers(subject, policy, new)


def other_rank(manifest: dict[str, Any]) -> str:
    manifest["adapter"]["config"]["r"] = 4
    return "lora_A.weight' has rank 8"


def unknown_module(manifest: dict[str, Any]) -> str:
    path = Path(manifest["path"])
    path.write_bytes(path.read_bytes().replace(b"layers.1.mlp.up_proj", b"layers.9.mlp.up_proj"))
    for entry in manifest["tensors"]:
        entry["name"] = entry["name"].replace("layers.1.mlp.up_proj", "layers.9.mlp.up_proj")
    return "layers.9.mlp.up_proj.weight"


def wrong_checksum(manifest: dict[str, Any]) -> str:
    manifest["tensors"][3]["xxh3"] = "0" * 16
    name: str = manifest["tensors"][3]["name"]
    return name


@pytest.mark.parametrize("damage", [other_rank, unknown_module, wrong_checksum])
async def test_a_wrong_adapter_is_refused_by_name_and_the_old_weights_serve(
    subject: Subject, policy: PeftPolicy, damage: Any
) -> None:
    policy.train(1, seed=20)
    good = await subject.load(subject.publish(policy))
    manifest = subject.publish(policy)
    name = damage(manifest)
    subject.announce(manifest)
    async with asyncio.timeout(60):
        while name not in (cause := await subject.cause()):
            await asyncio.sleep(0.05)
    assert f"version {good} stays" in cause
    await check_answers(subject, policy, good)
    policy.train(1, seed=21)
    await check_answers(subject, policy, await subject.load(subject.publish(policy)))
    assert not await subject.cause()


async def test_a_full_version_after_an_adapter_is_loaded_as_it_is(
    subject: Subject, policy: PeftPolicy, reference: Reference
) -> None:
    await subject.load(subject.publish(policy))
    manifest = subject.publisher.write(next(subject.versions), reference.first.items()).as_dict()
    version = await subject.load(manifest)
    greedy = await subject.ask()
    assert greedy.version_spans == [(version, 0, 16)]
    assert greedy.token_ids == reference.greedy(PROMPT, 16)


@pytest.mark.torch
async def test_over_http_the_adapter_alone_travels_and_nothing_is_left(tiny_model: str, tmp_path: Path) -> None:
    files = FileServer(tmp_path / "published", TOKEN)
    await files.start()
    publisher = WeightPublisher(tmp_path / "published", "http", base_url=files.url, model=Path(tiny_model))
    queue, policy = StubQueue(), PeftPolicy(tiny_model)
    job = {"config": small_config(), "model": tiny_model, "new_engine": make_engine}
    async with rollout_server(queue, tmp_path, **job) as server:
        client = RolloutClient(queue, TOKEN, timeout_s=60)
        subject = Subject(server, client, publisher, 0)
        for seed in range(2):
            policy.train(2, seed)
            await check_answers(subject, policy, await subject.load(subject.publish(policy)))
        fetched = [path.name for path in (tmp_path / "weights-of-s0").glob("*-weights-*")]
        assert len(fetched) == 1
        await client.close()
    await files.stop()
    assert not (tmp_path / "weights-of-s0").exists()
