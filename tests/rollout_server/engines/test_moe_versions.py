"""A mixture of experts from the trainer to an engine: full versions and deltas, whose logprobs are the trainer's."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

torch = pytest.importorskip("torch")

from tests.rollout_server.conformance.subject import ENGINES, SGLANG, Subject, prompt
from tests.rollout_server.conftest import VOCAB, ask, skip_without, whole
from tests.tiny_model import save_tiny_model

from penstock.rollout_server.engines import check_complete, tensor_shapes
from penstock.trainer import ModelLimits, Pack, Ranks, TrainerConfig, join_rows, make_row
from penstock.trainer.engines.fsdp import FSDPEngine
from penstock.transfer_queue import Segment
from penstock.weight_sync import Manifest, WeightPublisher

pytestmark = pytest.mark.timeout(600, func_only=True)
TOLERANCE = 1e-4


def pack_of(prompt_ids: Sequence[int], sampled: Sequence[int]) -> Pack:
    segment = Segment(
        prompt_ids=np.array(prompt_ids, dtype=np.int32),
        response_ids=np.array(sampled, dtype=np.int32),
        response_mask=np.ones(len(sampled), dtype=np.uint8),
        response_logprobs=np.zeros(len(sampled), dtype=np.float32),
        version_spans=np.array([[0, 0, len(sampled)]], dtype=np.int32),
        turn_starts=np.array([0], dtype=np.int32),
    )
    return join_rows([make_row(0, segment, "", step=0, bound=0, model=ModelLimits(context=256, vocab=VOCAB))])


class MoeTrainer:
    """The engine fsdp on a tiny mixture, and the versions that it publishes: full and delta in turn."""

    def __init__(self, model: str, folder: Path, ranks: Ranks) -> None:
        self.engine = FSDPEngine(model, TrainerConfig(lr=3e-3, eps=1e-4), ranks)
        self.shapes = tensor_shapes(model)
        self._publisher = WeightPublisher(folder, "shm", keep=8, full_every=2)
        self._version = 0

    def next_version(self) -> Manifest:
        """After one update towards other answers."""
        pack = pack_of(prompt(9), [(13 * self._version + 7 * n) % VOCAB for n in range(40)])
        loss = lambda pack, outputs: -outputs.logprobs.sum()  # noqa: E731
        assert not self.engine.update([pack], loss, 40.0, self._version).skipped
        self._version += 1
        return self._publisher.write(self._version, self.engine.weights(torch.float32))

    def logprobs(self, prompt_ids: Sequence[int], sampled: Sequence[int]) -> list[float]:
        (found,) = self.engine.score([pack_of(prompt_ids, sampled)])
        values: list[float] = found.tolist()
        return values


NEEDS_GPU = pytest.mark.skipif(
    shutil.which("nvidia-smi") is None,
    reason="no NVIDIA GPU here: SGLang's kernels of mixtures have no build for CPUs; scripts/gpu-check runs this",
)
WITH_MIXTURES = [
    *(engine for engine in ENGINES if engine is not SGLANG),
    pytest.param("sglang", marks=[pytest.mark.sglang, NEEDS_GPU]),
]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    """vLLM on CPUs needs a head_dim of 32."""
    changes: dict[str, Any] = {
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
        **{"vocab_size": VOCAB, "hidden_size": 64, "head_dim": 32, "max_position_embeddings": 2048},
        **{"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None, "initializer_range": 0.08, "dtype": "float32"},
    }
    return save_tiny_model(tmp_path_factory.mktemp("mixture"), "Qwen3Moe", **changes)


@pytest.fixture(scope="module")
def moe_trainer(mixture: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MoeTrainer]:
    ranks = Ranks.open(timeout_s=60)
    try:
        yield MoeTrainer(mixture, tmp_path_factory.mktemp("versions"), ranks)
    finally:
        ranks.close()


@pytest.mark.torch
def test_a_version_has_the_tensors_of_the_models_files(moe_trainer: MoeTrainer) -> None:
    manifest = moe_trainer.next_version()
    check_complete(manifest, moe_trainer.shapes)
    assert any(entry.name.endswith("experts.3.down_proj.weight") for entry in manifest.tensors)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=WITH_MIXTURES)
async def subject(
    request: pytest.FixtureRequest, mixture: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Subject]:
    name: str = request.param
    await skip_without(name)
    started = await Subject.start(name, mixture, tmp_path_factory.mktemp("logs"))
    try:
        yield started
    finally:
        await started.engine.stop()


@pytest.mark.asyncio(loop_scope="module")
async def test_an_engine_samples_what_the_trainer_says(subject: Subject, moe_trainer: MoeTrainer) -> None:
    kinds = set()
    for number in range(4):
        manifest = moe_trainer.next_version()
        kinds.add(manifest.files[-1].base_version is None)
        await subject.engine.load_weights(manifest)
        answer = await whole(subject.engine, ask(prompt(number), 40))
        assert answer.version_spans == [(manifest.version, 0, 40)]
        expected = moe_trainer.logprobs(prompt(number), answer.token_ids)
        assert answer.logprobs == pytest.approx(expected, abs=TOLERANCE)
    assert kinds == {True, False}, "full versions and deltas"
