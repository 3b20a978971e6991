"""Adapters of a real peft model on real rollout servers: a sidecar of its own for each test, the folder's engines."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import xxhash
from tests.rollout_server.conformance.subject import PROMPT, Subject
from tests.rollout_server.conftest import (
    TOKEN,
    Reference,
    RunningServer,
    RunQueue,
    rollout_server,
    small_config,
)
from tests.rollout_server.precision import assert_close, assert_greedy, tolerance

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from tests.rollout_server.peft_policy import PeftPolicy

from penstock.rollout_server import EngineInfo, GenerateRequest, Generation, RolloutClient, Sampling, make_engine
from penstock.transfer_queue import Announcement
from penstock.weight_sync import FileServer, WeightPublisher

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(900)]


@dataclass
class Setting:
    """A server under test, what it is sent, and who asks it."""

    server: RunningServer
    client: RolloutClient
    publisher: WeightPublisher
    versions: itertools.count[int]
    long: int
    engine: str

    def publish(self, policy: PeftPolicy) -> dict[str, Any]:
        found = self.publisher.write_adapter(next(self.versions), policy.tensors().items(), policy.config())
        return found.as_dict()

    def announce(self, manifest: dict[str, Any]) -> int:
        self.server.queue.announced = Announcement(manifest["version"], manifest)
        version: int = manifest["version"]
        return version

    async def load(self, manifest: dict[str, Any]) -> int:
        version = self.announce(manifest)
        await self.server.until(lambda: self.server.queue.registered["s0"].version == version, 300)
        return version

    async def ask(self, count: int = 16, temperature: float = 0.0) -> Generation:
        sampling = Sampling(max_new_tokens=count, temperature=temperature)
        return await self.client.generate(GenerateRequest(token_ids=PROMPT, sampling=sampling))


class Borrowed:
    """An engine that runs already, as a sidecar starts one. It outlives the sidecar."""

    def __init__(self, subject: Subject, version: int) -> None:
        self._subject, self._version = subject, version

    def __getattr__(self, name: str) -> Any:
        return getattr(self._subject.engine, name)

    async def start(self) -> EngineInfo:
        return self._subject.info.model_copy(update={"version": self._version})

    async def stop(self) -> None:
        self._subject.holds_first = False


@pytest_asyncio.fixture(loop_scope="package")
async def setting(subject: Subject, reference: Reference, tmp_path: Path) -> AsyncIterator[Setting]:
    version = await subject.hold_first(reference)
    publisher = WeightPublisher(tmp_path / "published", "shm", keep=4, model=Path(subject.model))
    queue = RunQueue()
    job = {"config": subject.engine.config, "model": subject.model}
    async with rollout_server(queue, tmp_path, new_engine=lambda *_: Borrowed(subject, version), **job) as server:
        client = RolloutClient(queue, TOKEN, timeout_s=400)
        yield Setting(server, client, publisher, subject.versions, subject.long, subject.name)
        await client.close()


@pytest.fixture
def policy(tiny_model: str) -> PeftPolicy:
    return PeftPolicy(tiny_model)


async def check_answers(setting: Setting, policy: PeftPolicy, version: int) -> list[float]:
    """That the server samples from the peft model as it is now; returns the logprobs of its greedy answer."""
    greedy = await setting.ask()
    assert greedy.version_spans == [(version, 0, 16)]
    assert_greedy(setting.engine, policy, PROMPT, greedy.token_ids, "adapter")
    sampled = await setting.ask(64, temperature=1.0)
    assert_close(sampled.logprobs, policy.logprobs(PROMPT, sampled.token_ids), tolerance(setting.engine, "adapter"))
    return greedy.logprobs


async def test_each_adapter_changes_what_is_sampled_and_replaces_the_one_before(
    setting: Setting, policy: PeftPolicy, tiny_model: str
) -> None:
    answers = [(await setting.ask()).logprobs]
    for seed in range(3):
        policy.train(3, seed)
        manifest = setting.publish(policy)
        assert len(manifest["tensors"]) == 2 * 7 * 2  # lora_A and lora_B of 7 layers of 2 blocks, nothing else
        # r = 8 in layers of 64 to 192: a third of this tiny model; test_adapter has a wide one.
        assert manifest["bytes"] < 0.35 * (Path(tiny_model) / "model.safetensors").stat().st_size
        answers.append(await check_answers(setting, policy, await setting.load(manifest)))
    for one, other in itertools.combinations(answers, 2):
        assert one != pytest.approx(other, abs=tolerance(setting.engine, "adapter").largest)
    assert setting.server.queue.reported[-1].version == manifest["version"]


IN_FLIGHT = 8


async def test_requests_in_flight_go_on_over_an_adapter(setting: Setting, policy: PeftPolicy) -> None:
    for seed in range(9, 14):
        before = copy.deepcopy(policy)
        old = await setting.load(setting.publish(policy))
        policy.train(2, seed=seed)
        manifest = setting.publish(policy)
        answers: list[Generation] = []
        swapped = asyncio.Event()

        async def ask_again(answers: list[Generation] = answers, swapped: asyncio.Event = swapped) -> None:
            while not swapped.is_set():  # however long the adapter takes, answers are under way when it comes
                answers.append(await setting.ask(setting.long, temperature=1.0))

        asking = [asyncio.create_task(ask_again()) for _ in range(IN_FLIGHT)]
        await setting.server.status("/health", lambda found: found["in_flight"] > 0)
        new = await setting.load(manifest)
        swapped.set()
        await asyncio.gather(*asking)
        versions = [[version for version, _, _ in answer.version_spans] for answer in answers]
        assert all(seen in ([old], [old, new], [new]) for seen in versions)
        if [old, new] in versions:
            break  # else all of them were between two answers
    answer = answers[versions.index([old, new])]
    swap = answer.version_spans[1][1]
    expected = before.logprobs(PROMPT, answer.token_ids[:swap])
    assert_close(answer.logprobs[:swap], expected, tolerance(setting.engine, "adapter"))
    await check_answers(setting, policy, new)


def other_rank(manifest: dict[str, Any]) -> str:
    manifest["adapter"]["config"]["r"] = 4
    return "lora_A.weight' has rank 8"


def unknown_module(manifest: dict[str, Any]) -> str:
    path = Path(manifest["path"])
    renamed = path.read_bytes().replace(b"layers.1.mlp.up_proj", b"layers.9.mlp.up_proj")
    path.write_bytes(renamed)
    manifest["xxh3"] = xxhash.xxh3_64_hexdigest(renamed)
    for entry in manifest["tensors"]:
        entry["name"] = entry["name"].replace("layers.1.mlp.up_proj", "layers.9.mlp.up_proj")
    return "layers.9.mlp.up_proj.weight"


def wrong_checksum(manifest: dict[str, Any]) -> str:
    manifest["tensors"][3]["xxh3"] = "0" * 16
    name: str = manifest["tensors"][3]["name"]
    return name


@pytest.mark.parametrize("damage", [other_rank, unknown_module, wrong_checksum])
async def test_a_wrong_adapter_is_refused_by_name_and_the_old_weights_serve(
    setting: Setting, policy: PeftPolicy, damage: Any
) -> None:
    policy.train(1, seed=20)
    good = await setting.load(setting.publish(policy))
    manifest = setting.publish(policy)
    name = damage(manifest)
    setting.announce(manifest)
    health = await setting.server.status("/health", lambda found: name in found["cause"])
    assert health["ok"]
    assert f"version {good} stays" in health["cause"]
    await check_answers(setting, policy, good)
    policy.train(1, seed=21)
    await check_answers(setting, policy, await setting.load(setting.publish(policy)))
    assert not (await setting.server.status("/health"))["cause"]


async def test_a_full_version_after_an_adapter_is_loaded_as_it_is(
    setting: Setting, policy: PeftPolicy, reference: Reference
) -> None:
    await setting.load(setting.publish(policy))
    manifest = setting.publisher.write(next(setting.versions), reference.first.items()).as_dict()
    version = await setting.load(manifest)
    greedy = await setting.ask()
    assert greedy.version_spans == [(version, 0, 16)]
    assert_greedy(setting.engine, reference, PROMPT, greedy.token_ids)


@pytest.mark.torch
async def test_over_http_the_adapter_alone_travels_and_nothing_is_left(tiny_model: str, tmp_path: Path) -> None:
    files = FileServer(tmp_path / "published", TOKEN)
    await files.start()
    publisher = WeightPublisher(tmp_path / "published", "http", base_url=files.url, model=Path(tiny_model))
    queue, policy = RunQueue(), PeftPolicy(tiny_model)
    job = {"config": small_config(), "model": tiny_model, "new_engine": make_engine}
    async with rollout_server(queue, tmp_path, **job) as server:
        client = RolloutClient(queue, TOKEN, timeout_s=400)
        setting = Setting(server, client, publisher, itertools.count(1), 450, "hf")
        for seed in range(2):
            policy.train(2, seed)
            await check_answers(setting, policy, await setting.load(setting.publish(policy)))
        fetched = [path.name for path in (tmp_path / "weights-of-s0").glob("*-weights-*")]
        assert len(fetched) == 1
        await client.close()
    await files.stop()
    assert not (tmp_path / "weights-of-s0").exists()
