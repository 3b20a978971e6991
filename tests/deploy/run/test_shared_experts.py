"""A whole run of a tiny mixture whose experts two trainer ranks share out."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.conftest import RECIPE, SMALL, assert_accounts_balance

pytestmark = [pytest.mark.deep, pytest.mark.redis, pytest.mark.bwrap, pytest.mark.torch, pytest.mark.timeout(1500)]
STEPS = 4


def save_mixture(folder: Path) -> str:
    """The recipe's tokenizer and widths, with random weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    policy = RECIPE.parent / "calculator" / "model"
    shutil.copytree(policy, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    declared: dict[str, Any] = json.loads((policy / "config.json").read_text())
    for key in ("model_type", "architectures", "mlp_only_layers"):
        declared.pop(key, None)
    mixture = Qwen3MoeConfig(
        **declared, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True
    )
    Qwen3MoeForCausalLM(mixture).float().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    "learning", [(), ("trainer.lora.rank=8", "trainer.lora.targets=[all-linear, experts]")], ids=["all", "low-rank"]
)
def test_a_run_trains_a_mixture_over_two_ranks_with_replayed_routes(
    learning: tuple[str, ...], start_run: Any, tmp_path: Path
) -> None:
    words = (f"model={save_mixture(tmp_path / 'mixture')}", "trainer.ranks=2", "trainer.parallel.expert=2")
    run = start_run("experts", *SMALL, f"trainer.steps={STEPS}", "rollout.routing_replay=true", *words, *learning)
    summary = run.finish()
    assert (summary["steps"], summary["ended"]) == (STEPS, f"all {STEPS} steps are trained")
    assert summary["logprob_abs_diff_mean"] <= 1e-3
    assert summary["weight_updates"] >= 2
    assert_accounts_balance(summary)
    rows = run.rows("metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert all(row["moe/replayed"] > 0.9 for row in rows), "routes arrive"
    assert all(1.0 <= row["moe/load_max_over_mean"] <= 8.0 for row in rows)
    assert (run.root / "final_model" / "config.json").is_file()
    assert (run.root / "final_adapter").is_dir() == bool(learning)
