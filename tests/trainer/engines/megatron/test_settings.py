"""What the engine refuses, before anything is loaded and on the wrong machine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from penstock.trainer import BadJob, TrainerConfig
from penstock.trainer.engines.megatron import settings

pytestmark = pytest.mark.torch


def test_a_machine_without_megatron_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_is_installed", lambda module: False)
    with pytest.raises(
        BadJob, match=r"megatron\.core and mbridge not installed in this Python; scripts/setup-megatron"
    ):
        settings.check_machine(TrainerConfig(engine="megatron"))


def test_a_machine_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_is_installed", lambda module: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BadJob, match="computes on NVIDIA GPUs, and torch sees none here"):
        settings.check_machine(TrainerConfig(engine="megatron"))


@pytest.mark.parametrize(
    ("dtype", "reason"), [("bfloat16", "that is not installed in this Python"), ("float32", "dtype is float32")]
)
def test_context_parallelism_without_its_kernels_is_refused(
    dtype: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = {"megatron.core", "mbridge"} | ({"transformer_engine"} if dtype == "float32" else set())
    monkeypatch.setattr(settings, "_is_installed", lambda module: module in installed)
    monkeypatch.setattr(settings, "require_gpu", lambda: None)
    config = TrainerConfig(engine="megatron", dtype=dtype, ranks=2, parallel={"context": 2})
    with pytest.raises(BadJob, match=reason):
        settings.check_machine(config)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"tensor": 4}, "num_key_value_heads 2, which trainer.parallel.tensor 4 does not divide"),
        ({"pipeline": 4}, "num_hidden_layers 6, which trainer.parallel.pipeline 4 does not divide"),
        ({"expert": 2}, "num_experts None, which trainer.parallel.expert 2 does not divide"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused(parallel: dict[str, int], message: str) -> None:
    shape = SimpleNamespace(num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=2, vocab_size=64)
    with pytest.raises(BadJob, match=message):
        settings.check_model(shape, TrainerConfig(parallel=parallel).parallel, "models/tiny")


def test_a_mixture_whose_weights_mbridge_would_normalise_is_refused() -> None:
    shape = SimpleNamespace(model_type="qwen3_moe", norm_topk_prob=False, num_hidden_layers=2)
    with pytest.raises(BadJob, match="norm_topk_prob"):
        settings.check_model(shape, TrainerConfig().parallel, "models/tiny")
    shape.norm_topk_prob = True
    settings.check_model(shape, TrainerConfig().parallel, "models/tiny")


def test_a_named_python_that_cannot_run_is_refused() -> None:
    with pytest.raises(BadJob, match=r"trainer\.megatron\.python: /nowhere/python cannot be run"):
        settings.find_python("/nowhere/python")
