"""The engine megatron for real, on gloo: what the engine fsdp computes, in every layout; weights and checkpoints."""

from __future__ import annotations

import asyncio
from pathlib import Path
from shutil import which
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from megatron_runs import INSTALLED, LAYOUTS, PYTHON, metrics, on_ranks, with_distinct_norms  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from trainer_support import make_job  # noqa: E402

from penstock.trainer.engines.megatron.settings import MEND  # noqa: E402
from penstock.trainer.loop import train  # noqa: E402

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(not INSTALLED, reason=f"no megatron-core and mbridge in {PYTHON}: {MEND}"),
    pytest.mark.skipif(
        which("nvidia-smi") is not None, reason="its CPU tests run where Transformer Engine is not there"
    ),
]

EVERYTHING = {
    "advantage": "reinforce_plus_plus",
    "kl": {"in_reward": 0.05, "in_loss": 0.01, "target": 0.5},
    "loss": "kl_cov",
    "loss_options": {"share": 0.1},
    "aggregation": "episode_mean",
    "entropy_bonus": 0.01,
    "weight_decay": 0.1,
    "minibatches": 2,
    "micro_batch_tokens": 48,
}
"""All that is summed over replicas or sent between stages: whitening, choices, KL per episode, scores, entropy."""


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> str:
    return with_distinct_norms(tmp_path_factory.mktemp("dense"), "Qwen3", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> str:
    return with_distinct_norms(tmp_path_factory.mktemp("tied"), "Qwen3", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    changes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
    return with_distinct_norms(tmp_path_factory.mktemp("mixture"), "Qwen3Moe", tie_word_embeddings=False, **changes)


def final_model(folder: Path) -> dict[str, Any]:
    return load_file(folder / "run" / "final_model" / "model.safetensors")


def both_runs(tmp_path: Path, model: str, layout: str, algorithm: dict[str, Any]) -> tuple[Path, Path]:
    settings = {"steps": 3, **algorithm}
    one, other = tmp_path / "fsdp", tmp_path / "megatron"
    for folder in (one, other):
        folder.mkdir()
    asyncio.run(train(make_job(one, model, settings)))
    on_ranks("run", other, model, {**settings, **LAYOUTS[layout]})
    return one, other


def assert_same_numbers(one: Path, other: Path) -> None:
    for a, b in zip(metrics(one), metrics(other), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=2e-6)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
        assert b["logprob_abs_diff_all_mean"] == pytest.approx(a["logprob_abs_diff_all_mean"], rel=1e-5)
        for name in ("kl_coefficient", "kl_per_episode", "kl_reference", "entropy"):
            assert b.get(name, 0.0) == pytest.approx(a.get(name, 0.0), rel=1e-4, abs=1e-7), name
        for exact in ("reward", "tokens", "tokens_trained", "staleness_tokens", "episode/tool_calls", "updates"):
            assert b[exact] == a[exact], exact


def assert_same_weights(expected: dict[str, Any], found: dict[str, Any], atol: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, atol=atol, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("layout", ["1", "dp2", "tp2", "tp2 pp2"])
def test_a_run_gives_what_fsdp_gives(layout: str, tmp_path: Path, dense: str) -> None:
    one, other = both_runs(tmp_path, dense, layout, {} if layout in ("1", "dp2") else EVERYTHING)
    assert_same_numbers(one, other)
    assert_same_weights(final_model(one), final_model(other), 2e-5)


def test_a_tied_embedding_on_two_stages_is_one(tmp_path: Path, tied: str) -> None:
    one, other = both_runs(tmp_path, tied, "pp2", {})
    assert_same_numbers(one, other)
    assert_same_weights(final_model(one), final_model(other), 2e-5)


def test_experts_on_two_ranks_give_what_fsdp_gives(tmp_path: Path, mixture: str) -> None:
    one, other = both_runs(tmp_path, mixture, "ep2", {})
    assert_same_numbers(one, other)


@pytest.mark.parametrize(("kind", "layout"), [("dense", "tp2 pp2"), ("tied", "pp2"), ("mixture", "ep2")])
def test_weights_come_out_as_they_went_in_to_the_bit(
    kind: str, layout: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(kind)
    on_ranks("round_trip", tmp_path, model, LAYOUTS[layout])
    assert_same_weights(load_file(Path(model) / "model.safetensors"), load_file(tmp_path / "published.safetensors"), 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_goes_on_in_its_own_layout_to_the_bit_and_in_another_one(
    dtype: str, tmp_path: Path, dense: str
) -> None:
    def after(case: str, layout: str, name: str) -> dict[str, Any]:
        on_ranks(case, tmp_path, dense, {"dtype": dtype, **LAYOUTS[layout]})
        return load_file(tmp_path / f"{name}.safetensors")

    straight = after("first_steps", "tp2 pp2", "straight")
    saved = load_file(tmp_path / "saved.safetensors")
    assert_same_weights(straight, after("next_step", "tp2 pp2", "resumed"), 0)
    assert_same_weights(saved, load_file(tmp_path / "restored.safetensors"), 0)
    # bfloat16: a step is smaller than the last digit of most weights, and rounding differs between layouts
    assert_same_weights(straight, after("next_step", "dp2", "resumed"), 2e-5 if dtype == "float32" else 1e-2)
    assert_same_weights(saved, load_file(tmp_path / "restored.safetensors"), 0)
