"""Tokens are read by the experts that read them in the engine, on any layout of ranks: what the engine fsdp computes.

All layouts in one program, which forks four ranks, then two, then one.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from megatron_runs import ON_CPU, Case, on_ranks, with_distinct_norms
from replayed_rows import DIVISOR, LENGTHS, SETTINGS, UNTOLD, by_row, packs_of, told_rows, weighted
from safetensors.torch import load_file
from tests.tiny_model import save_tiny_model
from torch.distributed.tensor import DTensor

from penstock.trainer import Ranks, TrainerConfig
from penstock.trainer.engines.fsdp import FSDPEngine
from penstock.trainer.metrics import router_metrics

pytestmark = ON_CPU

MIXTURE: dict[str, Any] = {
    **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True},
    **{"num_hidden_layers": 4, "tie_word_embeddings": False},
}
AGAIN = {"recompute": True}
LAYOUTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "one rank": ("replay", "1", {}),
    "computed again": ("replay", "1", AGAIN),
    "experts on two replicas": ("replay", "ep2", AGAIN),
    "two stages": ("replay", "pp2", {}),
    "two stages, computed again": ("replay", "pp2", AGAIN),
    "split matrices and tokens": ("replay_with_sequence_parallelism", "tp2 ep2", AGAIN),
    "the same on two stages": ("replay_with_sequence_parallelism", "tp2 pp2 ep2", {}),
    "split matrices and tokens, every expert on both ranks": ("replay_with_sequence_parallelism", "tp2", AGAIN),
    "cut rows": ("replay_with_context_parallelism", "cp2 ep2", AGAIN),
}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    return with_distinct_norms(tmp_path_factory.mktemp("mixture"), "Qwen3Moe", **MIXTURE)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, mixture: str) -> Path:
    """Folder of all that the engine megatron computed."""
    top = tmp_path_factory.mktemp("megatron")
    dense = save_tiny_model(top / "dense")
    cases = [Case(case, top / name, mixture, layout, given) for name, (case, layout, given) in LAYOUTS.items()]
    on_ranks(top, [*cases, Case("refused_replay", top / "refused", dense, "1")])
    return top


@pytest.fixture(scope="module")
def expected(mixture: str) -> dict[str, Any]:
    """What the engine fsdp computes in this process."""
    ranks = Ranks.open(timeout_s=30)
    try:
        engine = FSDPEngine(mixture, TrainerConfig(**SETTINGS), ranks, routing_replay=True)
        packs = packs_of(told_rows(engine.limits))
        logprobs = by_row(packs, engine.score(packs))
        free = by_row(packs, engine.score([replace(pack, experts=None) for pack in packs]))
        engine._actor.accumulate(packs, weighted, DIVISOR)
        gradients = {}
        for name, parameter in engine.policy.model.named_parameters():
            gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            gradients.update(engine.policy.names.split(name, gradient))
        loads = engine.take_router_loads()
        assert loads is not None
        return {"logprobs": logprobs, "free": free, "gradients": gradients, "loads": router_metrics(loads, ranks)}
    finally:
        ranks.close()


@pytest.mark.parametrize("name", LAYOUTS)
def test_logprobs_are_those_of_fsdp_with_the_same_experts(name: str, found: Path, expected: dict[str, Any]) -> None:
    logprobs = {row: one for file in (found / name).glob("logprobs_*") for row, one in load_file(file).items()}
    assert sorted(logprobs) == [f"row {number}" for number in range(len(LENGTHS))]
    for row, one in expected["logprobs"].items():
        torch.testing.assert_close(logprobs[row], one, atol=1e-5, rtol=0)


def test_own_choices_would_give_other_logprobs(expected: dict[str, Any]) -> None:
    """So that what is above could fail."""
    apart = {row: float((expected["free"][row] - one).abs().max()) for row, one in expected["logprobs"].items()}
    assert [row for row, one in apart.items() if one < 1e-2] == [f"row {UNTOLD}"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_are_those_of_fsdp_with_the_same_experts(name: str, found: Path, expected: dict[str, Any]) -> None:
    gradients = load_file(found / name / "gradients.safetensors")
    assert gradients.keys() == expected["gradients"].keys()
    for parameter, one in expected["gradients"].items():
        torch.testing.assert_close(
            gradients[parameter], one, atol=1e-5, rtol=1e-4, msg=lambda text, at=parameter: f"{at}: {text}"
        )
    gates = [one for parameter, one in gradients.items() if parameter.endswith("mlp.gate.weight")]
    assert len(gates) == MIXTURE["num_hidden_layers"]
    assert all(float(one.abs().max()) > 1e-3 for one in gates)


@pytest.mark.parametrize("name", LAYOUTS)
def test_loads_are_those_of_fsdp(name: str, found: Path, expected: dict[str, Any]) -> None:
    """Whatever is filled up, cut, or computed twice, each token counts once."""
    numbers = json.loads((found / name / "found.json").read_text())
    assert {key: value for key, value in numbers.items() if key.startswith("moe/")} == pytest.approx(
        expected["loads"], rel=1e-5
    )
    assert 0 < numbers["moe/replayed"] < 1
    assert 0 < numbers["moe/rerouted"] < 1


def test_a_model_without_experts_is_refused(found: Path) -> None:
    assert (found / "refused" / "refusal").read_text() == (
        "rollout.routing_replay: the model has no layers with experts; "
        "set it to false, and the trainer's own routers choose"
    )
