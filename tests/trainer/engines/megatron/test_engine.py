"""The engine megatron for real, on gloo: what the engine fsdp computes, in every layout; weights and checkpoints.

All in one program, which forks four ranks and then two, each through many cases: importing takes longer than they do.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from megatron_runs import ON_CPU, Case, metrics, on_ranks, with_distinct_norms
from safetensors.torch import load_file
from trainer_support import make_job
from transformers import AutoModelForCausalLM

from penstock.trainer import train

pytestmark = ON_CPU

PLAIN: dict[str, Any] = {"steps": 3}
EVERYTHING: dict[str, Any] = {
    "steps": 3,
    "advantage": "reinforce_plus_plus",
    "kl": {"in_reward": 0.05, "in_loss": 0.01, "target": 0.5},
    "loss": "kl_cov",
    "loss_options": {"share": 0.1},
    "aggregation": "episode_mean",
    "entropy_bonus": 0.01,
    "weight_decay": 0.1,
    "minibatches": 2,
    "recompute": True,
    "micro_batch_tokens": 48,
}
"""All that is summed over replicas or sent between stages: whitening, choices, KL per episode, scores, entropy."""

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Qwen3", {"tie_word_embeddings": False}),
    "tied": ("Qwen3", {"tie_word_embeddings": True}),
    "mixture": (
        "Qwen3Moe",
        {
            "tie_word_embeddings": False,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
        },
    ),
}
RUNS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "two replicas": ("dp2", "dense", PLAIN),
    "split matrices": ("tp2", "dense", EVERYTHING),
    "split matrices and tokens": ("tp2", "dense", EVERYTHING),
    "a tied embedding on two stages": ("pp2", "tied", PLAIN),
    "experts on two ranks": ("ep2", "mixture", PLAIN),
    "split matrices on two stages": ("tp2 pp2", "dense", EVERYTHING),
}
ROUND_TRIPS = {"dense": "tp2 pp2", "tied": "pp2", "mixture": "ep2"}
DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = {name: (tmp_path_factory.mktemp(name), kind, changes) for name, (kind, changes) in MODELS.items()}
    return {name: with_distinct_norms(folder, kind, **changes) for name, (folder, kind, changes) in made.items()}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, models: dict[str, str]) -> Path:
    """Folder of all that the engine megatron computed."""
    top = tmp_path_factory.mktemp("megatron")
    runs = [
        Case("run_with_sequence_parallelism" if "tokens" in name else "run", top / name, models[model], layout, given)
        for name, (layout, model, given) in RUNS.items()
    ]
    trips = [Case("round_trip", top / model, models[model], layout) for model, layout in ROUND_TRIPS.items()]
    first = [checkpoint_case("first_steps", top, dtype, "tp2 pp2", models) for dtype in DTYPES]
    again = [checkpoint_case("next_step", top, dtype, "tp2 pp2", models) for dtype in DTYPES]
    other = [checkpoint_case("next_step", top, dtype, "dp2", models) for dtype in DTYPES]
    bad = Case("bad_step", top / "bad", models["dense"], "tp2 pp2", {"loss": "trainer_support:broken_loss"})
    cases = [*runs, *trips, *first, *again, *other, bad]
    on_ranks(top, cases)
    return top


def checkpoint_case(case: str, top: Path, dtype: str, layout: str, models: dict[str, str]) -> Case:
    return Case(case, top / dtype / f"{case} {layout}", models["dense"], layout, {"dtype": dtype})


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, models: dict[str, str]) -> dict[str, Path]:
    """By name of the run: what the engine fsdp gives in this process, each kind of run once."""
    kinds = {(model, str(given)): given for _, model, given in RUNS.values()}
    folders = {}
    for (model, key), given in kinds.items():
        folders[model, key] = tmp_path_factory.mktemp("fsdp")
        asyncio.run(train(make_job(folders[model, key], models[model], given)))
    return {name: folders[model, str(given)] for name, (_, model, given) in RUNS.items()}


def assert_same_numbers(one: Path, other: Path) -> None:
    for a, b in zip(metrics(one), metrics(other), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=5e-7)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
        assert b["logprob_abs_diff_all_mean"] == pytest.approx(a["logprob_abs_diff_all_mean"], rel=1e-5)
        for name in ("kl_coefficient", "kl_per_episode", "kl_reference", "entropy"):
            assert b.get(name, 0.0) == pytest.approx(a.get(name, 0.0), rel=1e-4, abs=1e-7), name
        for exact in ("reward", "tokens", "tokens_trained", "staleness_tokens", "episode/tool_calls", "updates"):
            assert b[exact] == a[exact], exact


def assert_same_weights(expected: Path, found: Path, atol: float) -> None:
    one, other = load_file(expected), load_file(found)
    assert other.keys() == one.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(
            other[name], tensor, atol=atol, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("name", RUNS)
def test_a_run_gives_what_fsdp_gives(name: str, found: Path, expected: dict[str, Path]) -> None:
    assert_same_numbers(expected[name], found / name)
    model = Path("run") / "final_model" / "model.safetensors"
    assert_same_weights(expected[name] / model, found / name / model, 2e-6)


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_weights_come_out_as_they_went_in_to_the_bit(name: str, found: Path, models: dict[str, str]) -> None:
    assert_same_weights(Path(models[name]) / "model.safetensors", found / name / "published.safetensors", 0)


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_an_export_is_written_a_file_at_a_time(name: str, found: Path, models: dict[str, str]) -> None:
    folder, given = found / name / "exported", load_file(Path(models[name]) / "model.safetensors")
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    assert all(file.stat().st_size < sum(tensor.nbytes for tensor in given.values()) / 2 for file in files)
    stored = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    expected = AutoModelForCausalLM.from_pretrained(models[name]).state_dict()
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[one], tensor) for one, tensor in expected.items())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checkpoint_goes_on_in_its_own_layout_to_the_bit_and_in_another_one(dtype: str, found: Path) -> None:
    straight, again, other = (
        found / dtype / name for name in ("first_steps tp2 pp2", "next_step tp2 pp2", "next_step dp2")
    )
    for resumed in (again, other):
        assert_same_weights(straight / "saved.safetensors", resumed / "saved.safetensors", 0)
    assert_same_weights(straight / "trained.safetensors", again / "trained.safetensors", 0)
    # bfloat16: a step is smaller than the last digit of most weights, and rounding differs between layouts
    atol = 2e-6 if dtype == "float32" else 1e-2
    assert_same_weights(straight / "trained.safetensors", other / "trained.safetensors", atol)


def test_a_checkpoint_is_written_and_read_one_parameter_at_a_time(found: Path) -> None:
    for file in (found / "float32/next_step dp2").glob("held_*.json"):
        held = json.loads(file.read_text())
        assert max(held["save"], held["load"]) < held["all"] / 2


def test_a_loss_that_is_no_number_leaves_no_trace_on_any_rank(found: Path) -> None:
    """Only the ranks of the last stage see it."""
    bad = found / "bad"
    assert [(bad / f"updates_{rank}").read_text() for rank in range(4)] == ["0 1"] * 4
    assert_same_weights(bad / "before.safetensors", bad / "after.safetensors", 0)
