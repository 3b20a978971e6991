"""Experts shared out over gloo ranks give what one rank's plain forward gives, judged in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import transformers
from expert_ranks import LENGTHS, PER_TOKEN
from mixtures import FAMILIES, QWEN
from plain_steps import STEPS, assert_close, assert_equal, launch, plain, reports, tolerance_after_updates
from safetensors.torch import load_file
from tests.tiny_model import SHAPE, save_tiny_model
from transformers import AutoModelForCausalLM

from benchmarks.trainer import shared_experts
from penstock.trainer.engines.fsdp.experts import experts_of
from penstock.trainer.engines.fsdp.tensor_parallel import CannotSplitModel

pytestmark = pytest.mark.torch
HIDDEN = SHAPE["hidden_size"]
LLAMA4 = {"num_local_experts": 4, "moe_layers": [1], "interleave_moe_layer_step": 2, "intermediate_size_mlp": 64}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {kind: save_tiny_model(tmp_path_factory.mktemp(kind), kind, **FAMILIES[kind]) for kind in FAMILIES}


def case(model: str, config: dict[str, Any], steps: int = STEPS, resume: str = "") -> dict[str, Any]:
    """Routes are replayed: where two experts nearly tie, float32 and float64 would choose by their last digits."""
    return {"model": model, "config": config, "steps": steps, "resume": resume, "replay": True}


def test_two_ranks_share_out_experts_and_give_one_ranks_results(models: dict[str, str], tmp_path: Path) -> None:
    parallel = {"Qwen3Moe": {"expert": 2}, "GptOss": {"expert": 2, "context": 2}}
    launch(tmp_path, 2, {kind: case(models[kind], {"parallel": layout}) for kind, layout in parallel.items()})
    for kind in parallel:
        assert_equal(plain(models[kind]), tmp_path / kind)
        for report in reports(tmp_path / kind):  # of the replica's tokens, also where two ranks share them out
            assert report["routed"], kind
            assert report["routed"] == pytest.approx([report["learned"]] * len(report["routed"]), rel=0.1)
    # Dispatch and combine of the forward and of the backward, k rows of float32 per token and layer with experts.
    of_ranks = reports(tmp_path / "Qwen3Moe")
    exchanged = 4 * 2 * PER_TOKEN * HIDDEN * 4 * sum(report["computed"] for report in of_ranks)
    assert sum(report["exchanged"] for report in of_ranks) == pytest.approx(exchanged, rel=0.05)
    assert sum(report["computed"] for report in of_ranks) < sum(LENGTHS), "rows share what they begin with"


LAYOUTS: dict[str, dict[str, Any]] = {
    "two parts of two shards": {"parallel": {"expert": 2}},
    "four parts": {"parallel": {"expert": 4}},
    "two sets of two parts": {"parallel": {"expert": 2, "replicate": 2}, "recompute": True},
    "tokens over two ranks": {"parallel": {"expert": 2, "context": 2}},
    "tokens over two ranks, four parts": {"parallel": {"expert": 4, "context": 2}, "recompute": "selective"},
    "states on the host": {"parallel": {"expert": 2}, "offload": True},
    "moments on the host": {"parallel": {"expert": 4}, "offload": "optimizer"},
    "inputs on the host": {"parallel": {"expert": 2}, "recompute": True, "activation_offload": True},
}


@pytest.mark.deep
def test_four_ranks_share_out_experts_in_every_layout(models: dict[str, str], tmp_path: Path) -> None:
    launch(tmp_path, 4, {name: case(models["Qwen3Moe"], config) for name, config in LAYOUTS.items()})
    expected = plain(models["Qwen3Moe"])
    for name in LAYOUTS:
        assert_equal(expected, tmp_path / name)


@pytest.mark.deep
@pytest.mark.parametrize("context", [1, 2])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_out_the_experts_of_every_family(
    ranks: int, context: int, models: dict[str, str], tmp_path: Path
) -> None:
    config = {"parallel": {"expert": ranks, "context": context}}
    launch(tmp_path, ranks, {kind: case(models[kind], config) for kind in FAMILIES})
    for kind in FAMILIES:
        assert_equal(plain(models[kind]), tmp_path / kind)


@pytest.mark.deep
@pytest.mark.timeout(1200)
def test_checkpoints_go_on_in_any_layout_and_number_of_ranks(models: dict[str, str], tmp_path: Path) -> None:
    """Of every family; `resume` is the case whose checkpoint is loaded."""

    def launched(ranks: int, cases: dict[str, tuple[dict[str, int], str]]) -> None:
        each = {
            f"{kind} {name}": case(models[kind], {"parallel": parallel}, *((1, f"{kind} {begun}") if begun else (2,)))
            for name, (parallel, begun) in cases.items()
            for kind in FAMILIES
        }
        launch(tmp_path, ranks, each)

    launched(2, {"two ranks": ({"expert": 2}, ""), "plain": ({}, "")})
    four = {"2 → 4": ({"expert": 4}, "two ranks"), "plain → 4": ({"expert": 2}, "plain")}
    four |= {"parts": ({"expert": 2}, ""), "parts → 4": ({"expert": 4}, "parts")}
    launched(4, {**four, "sets": ({"expert": 2, "replicate": 2}, ""), "sets → plain": ({}, "sets")})
    launched(2, {"parts → 2": ({"expert": 2}, "parts"), "4 → plain": ({}, "sets")})
    for kind in FAMILIES:
        expected = plain(models[kind])["weights"]
        for resumed in ("2 → 4", "plain → 4", "parts → 4", "sets → plain", "parts → 2", "4 → plain"):
            found = load_file(tmp_path / f"{kind} {resumed}" / "weights.safetensors")
            assert_close(found, expected, tolerance_after_updates(expected))


@pytest.mark.deep
@pytest.mark.parametrize("targets", ["all-linear", ["all-linear", "experts"]])
@pytest.mark.parametrize("kind", ["Qwen3Moe", "GptOss"])
def test_low_rank_matrices_learn_beside_experts_over_ranks(
    kind: str, targets: Any, models: dict[str, str], tmp_path: Path
) -> None:
    def of(parallel: dict[str, int], steps: int = STEPS, resume: str = "") -> dict[str, Any]:
        lora = {"rank": 8, "targets": targets}
        return case(models[kind], {"lora": lora, "parallel": parallel}, steps, resume)

    parts = {"two parts": of({"expert": 2}), "two sets": of({"expert": 2, "replicate": 2}), "four": of({"expert": 4})}
    resumed = {"begun": of({"expert": 2}, 2), "parts → four": of({"expert": 4}, 1, "begun")}
    launch(tmp_path, 4, {"whole": of({}), **parts, **resumed, "parts → whole": of({}, 1, "begun")})
    for name in (*parts, "parts → four", "parts → whole"):
        for file in ("weights", "published"):
            found, whole = (load_file(tmp_path / one / f"{file}.safetensors") for one in (name, "whole"))
            assert_close(found, whole, 1e-5)


@pytest.mark.parametrize(
    ("kind", "changes", "ranks", "message"),
    [
        ("Qwen3Moe", {**QWEN, "num_experts": 6}, 4, r"expert is 4, .*divide the 6 experts: set it to 2"),
        ("Qwen3", {}, 2, r"expert is 2, and Qwen3ForCausalLM has no layers with experts: set it to 1"),
        ("Llama4", LLAMA4, 2, r"experts of Llama4ForCausalLM \(Llama4TextExperts\) .*: set it to 1"),
    ],
)
def test_what_cannot_be_shared_out_is_refused_by_name(
    kind: str, changes: dict[str, Any], ranks: int, message: str
) -> None:
    config = getattr(transformers, f"{kind}TextConfig", None) or getattr(transformers, f"{kind}Config")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config(**{**SHAPE, **changes}))
    with pytest.raises(CannotSplitModel, match=message):
        experts_of(model, ranks)


@pytest.mark.deep
def test_a_rank_takes_its_part_of_a_layers_experts() -> None:
    """The bars of `penstock bench trainer` (docs/how/benchmarks.md) on four ranks, in two parts and in four."""
    figures = shared_experts()
    assert figures["peak_over_share"] <= 1.15, figures
    assert figures["exchanged_over_formula"] == pytest.approx(1, rel=0.05), figures
