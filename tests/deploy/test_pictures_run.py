"""A whole run on pictures with vLLM: a tiny Qwen3-VL, its dataset of files, ten steps at no staleness."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.deploy.conftest import assert_accounts_balance, assert_nothing_left
from tests.rollout_server.conftest import skip_without
from tests.vision_model import noise, save_qwen3_vl

pytestmark = [
    *(pytest.mark.deep, pytest.mark.slow, pytest.mark.redis, pytest.mark.torch, pytest.mark.vllm),
    pytest.mark.timeout(600),
]
STEPS = 10
RECIPE = """
name: pictures
model: model
max_staleness: sync
group_size: 2
groups_per_step: 2
data: {train: rows.jsonl}
agent:
  loop: single_turn
  workers: 1
  concurrency: 8
  max_new_tokens: 8
  max_response_tokens: 8
  reward: reward.py:compute_score
rollout: {engine: vllm, max_model_len: 512, max_concurrent: 8, start_timeout_s: 500.0}
trainer: {steps: 10, lr: 1.0e-3, micro_batch_tokens: 512, checkpoint_every: 10}
"""
REWARD = """
from hashlib import sha256

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    told_apart = int(sha256(solution_str.encode()).hexdigest()[:6], 16) / 2**34
    return len(set(solution_str)) / max(1, len(solution_str)) + told_apart
"""
"""Different answers have different rewards: a step in which no group has two rewards has no gradient."""


def make(folder: Path) -> Path:
    """The recipe beside its model, data and reward."""
    (folder / "model").mkdir()
    save_qwen3_vl(folder / "model", head_dim=32)
    rows = []
    for number, size in enumerate([(60, 90), (120, 60), (90, 90), (200, 60)] * 2):
        (folder / f"{number}.png").write_bytes(noise(size, number))
        two = number % 4 == 3  # of these one has a picture twice, and one has none
        words = "Which?" if number == 6 else f"{'<image>' * (1 + two)}Which colour?"
        pictures = [] if number == 6 else [f"{number}.png"] * (1 + two)
        prompt = [{"role": "user", "content": words}]
        reward = {"ground_truth": ""}
        rows.append({"prompt": prompt, "images": pictures, "data_source": "pictures", "reward_model": reward})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    (folder / "pictures.yaml").write_text(RECIPE)
    return folder / "pictures.yaml"


async def test_pictures_run_learns_on_vllm(start_run, tmp_path: Path) -> None:
    await skip_without("vllm")
    pytest.importorskip("PIL")
    recipe = make(tmp_path)
    run = start_run("pictures", recipe=recipe)
    run.wait_for(lambda: run.steps() >= 1)
    pids = run.pids()
    summary = run.finish()
    assert (summary["steps"], summary["ended"]) == (STEPS, f"all {STEPS} steps are trained")
    assert summary["staleness_max"] == 0
    assert_accounts_balance(summary)
    steps = run.rows("metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(STEPS))
    assert all(step["grad_norm"] > 0 for step in steps)
    assert all(step["logprob_abs_diff_mean"] <= 1e-2 for step in steps), "each version arrived, its tower too"
    assert_nothing_left(run, pids)
