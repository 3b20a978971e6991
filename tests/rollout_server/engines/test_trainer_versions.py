"""Versions of a real trainer reach every engine by each transport, and the engine's logprobs are then the trainer's.

A trainer (the engine `fsdp`) per family of models, one process per family and engine. Mixtures are what differs most
between a trainer and its engines: they are in the default run, the other families are `deep`.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

torch = pytest.importorskip("torch")

from tests.rollout_server.conformance.subject import Subject, prompt
from tests.rollout_server.conftest import VOCAB, ask, skip_without, whole
from tests.rollout_server.engines.hf.test_attention import pack_of
from tests.rollout_server.precision import HEAD_DIM
from tests.tiny_model import save_tiny_model

from penstock.rollout_server.engines.checkpoint import check_complete, tensor_shapes
from penstock.trainer import Ranks, TrainerConfig
from penstock.trainer.engines.fsdp import FSDPEngine
from penstock.weight_sync import Manifest, WeightPublisher

pytestmark = pytest.mark.timeout(600, func_only=True)
ANSWER = 40
"""Tokens."""
LEAST_CHANGE = 0.2
"""Of some token's logprob by an update: an engine that missed it is off by more than any arithmetic allows."""
SHAPE: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 64, "head_dim": HEAD_DIM, "max_position_embeddings": 2048},
    **{"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None, "initializer_range": 0.08, "dtype": "float32"},
    "tie_word_embeddings": False,
}
"""In float32 every row of a tied embedding changes in each update: a delta would be no smaller than a full version."""
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {}),
    "qwen2.5": ("Qwen2", {"num_attention_heads": 64 // HEAD_DIM, "num_key_value_heads": 1}),
    "qwen3-moe": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
    ),
}
"""transformers' name, and what its configuration has beside `SHAPE`."""
ENGINE_MARKS = {"hf": pytest.mark.torch, "vllm": pytest.mark.vllm, "sglang": pytest.mark.sglang}
IN_DEFAULT_RUN = {("qwen3-moe", "hf"), ("qwen3-moe", "vllm")}


def pairs() -> Iterator[Any]:
    """Every family on every engine."""
    for family, engine in itertools.product(FAMILIES, ENGINE_MARKS):
        deep = [] if (family, engine) in IN_DEFAULT_RUN else [pytest.mark.deep]
        yield pytest.param((family, engine), marks=[ENGINE_MARKS[engine], *deep], id=f"{family}-{engine}")


class Trainer:
    """The engine fsdp, and how far it has come."""

    def __init__(self, model: str, ranks: Ranks) -> None:
        self.model = model
        self.engine = FSDPEngine(model, TrainerConfig(lr=3e-3, eps=1e-4, dtype="float32"), ranks)
        self._steps = 0

    def train(self) -> None:
        """One update towards other answers."""
        seen = prompt(9), [(13 * self._steps + 7 * n) % VOCAB for n in range(ANSWER)]
        before = self.logprobs(*seen)
        loss = lambda pack, outputs: -outputs.logprobs.sum()  # noqa: E731
        assert not self.engine.update([pack_of(*seen, VOCAB)], loss, float(ANSWER), self._steps).skipped
        self._steps += 1
        assert max(abs(a - b) for a, b in zip(self.logprobs(*seen), before, strict=True)) > LEAST_CHANGE

    def logprobs(self, prompt_ids: Sequence[int], sampled: Sequence[int]) -> list[float]:
        (found,) = self.engine.score([pack_of(prompt_ids, sampled, VOCAB)])
        values: list[float] = found.tolist()
        return values


@pytest.fixture(scope="module")
def trainer_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Trainer]]:
    """By family, made when it is first asked for."""
    ranks, made = Ranks.open(timeout_s=60), dict[str, Trainer]()

    def find(family: str) -> Trainer:
        if family not in made:
            kind, changes = FAMILIES[family]
            made[family] = Trainer(save_tiny_model(tmp_path_factory.mktemp(kind), kind, **SHAPE | changes), ranks)
        return made[family]

    try:
        yield find
    finally:
        ranks.close()


@pytest.mark.torch
def test_a_version_has_the_tensors_of_the_models_files(trainer_of: Callable[[str], Trainer], tmp_path: Path) -> None:
    trainer = trainer_of("qwen3-moe")
    manifest = WeightPublisher(tmp_path, "shm").write(1, trainer.engine.weights(torch.float32))
    check_complete(manifest, tensor_shapes(trainer.model))
    assert any(entry.name.endswith("experts.3.down_proj.weight") for entry in manifest.tensors)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=list(pairs()))
async def pair(
    request: pytest.FixtureRequest, trainer_of: Callable[[str], Trainer], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Subject, Trainer]]:
    """An engine with the trainer of its model. It takes files, and is a member of the trainer's broadcasts."""
    family, engine = request.param
    await skip_without(engine)
    trainer = trainer_of(family)
    subject = await Subject.start(f"{engine}+broadcast", trainer.model, tmp_path_factory.mktemp("logs"))
    try:
        yield subject, trainer
    finally:
        await subject.stop()


async def by_file(subject: Subject, trainer: Trainer, folder: Path) -> Manifest:
    """A full version."""
    trainer.train()
    manifest = WeightPublisher(folder, "shm").write(next(subject.versions), trainer.engine.weights(torch.float32))
    assert manifest.files[-1].base_version is None
    return manifest


async def by_delta(subject: Subject, trainer: Trainer, folder: Path) -> Manifest:
    """What one update changed in the full version that the engine has."""
    publisher = WeightPublisher(folder, "shm", keep=8, full_every=2)
    full = publisher.write(next(subject.versions), trainer.engine.weights(torch.float32))
    await subject.swap(full)
    trainer.train()
    manifest = publisher.write(next(subject.versions), trainer.engine.weights(torch.float32))
    assert manifest.files[-1].base_version == full.version
    return manifest


async def by_broadcast(subject: Subject, trainer: Trainer, folder: Path) -> Manifest:
    """The trainer's own shards, received by the engine's member: no file is read."""
    assert subject.trainer is not None
    trainer.train()
    shards = trainer.engine.local_shards(torch.float32)
    assert shards is not None
    announced = await subject.trainer.publish_shards(next(subject.versions), shards, members=1)
    received: Manifest = await subject.fetch(announced)
    assert received.transport == "broadcast"
    return received


TRANSPORTS: dict[str, Callable[[Subject, Trainer, Path], Awaitable[Manifest]]] = {
    "file": by_file,
    "delta": by_delta,
    "broadcast": by_broadcast,
}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_engine_logprobs_are_the_trainers(pair: tuple[Subject, Trainer], transport: str, tmp_path: Path) -> None:
    subject, trainer = pair
    manifest = await TRANSPORTS[transport](subject, trainer, tmp_path)
    await subject.swap(manifest)
    for number in range(2):
        answer = await whole(subject.engine, ask(prompt(number), ANSWER))
        assert answer.version_spans == [(manifest.version, 0, ANSWER)]
        expected = trainer.logprobs(prompt(number), answer.token_ids)
        subject.close(answer.logprobs, expected)
