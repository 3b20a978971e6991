"""The sum of a trainer's rank against what torch's allocator reports of a backward."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.preflight.preflight_support import REPOSITORY, write_model

from penstock.deploy.preflight.model import read_config, read_weights
from penstock.deploy.preflight.model_shape import shape_of
from penstock.deploy.preflight.rank_memory import TILE_COLUMNS, TILE_LOGITS, trainer_bytes
from penstock.trainer import TrainerConfig

pytestmark = pytest.mark.torch
SIZES = {
    **{"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    **{"intermediate_size": 768, "vocab_size": 2048, "tie_word_embeddings": False},
}
MIXTURE = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
TOKENS = 512


def measure(ranks: int, folder: Path, cases: dict[str, Any]) -> dict[str, int]:
    program = REPOSITORY / "tests/trainer/memory_ranks.py"
    command = [sys.executable, str(program), str(ranks), str(folder), json.dumps(cases)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout.splitlines()[-1])
    assert report["tile"] == [TILE_LOGITS, TILE_COLUMNS]
    return {name: case["peak_bytes"] for name, case in report["cases"].items()}


def estimate(case: dict[str, Any]) -> float:
    """Bytes above weights and moments."""
    weights = read_weights(Path(case["model"]))
    assert weights is not None
    shape = shape_of(read_config(Path(case["model"])), weights)
    assert shape is not None
    parts = trainer_bytes(shape, TrainerConfig(**case["config"]), case["tokens"], critic=False)
    return sum(size for name, size in parts.items() if name not in ("weights", "moments"))


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, {"dense selective": {"recompute": "selective"}, "mixture recomputed": {"recompute": True}}),
        pytest.param(
            1,
            {"dense recomputed": {"recompute": True}, "mixture float32": {"recompute": True, "dtype": "float32"}},
            marks=pytest.mark.deep,
        ),
        pytest.param(
            2, {"mixture whole": {}, "mixture lora": {"recompute": True, "lora": {"rank": 8}}}, marks=pytest.mark.deep
        ),
    ],
)
def test_a_rank_takes_what_the_allocator_reports(tmp_path: Path, ranks: int, settings: dict[str, Any]) -> None:
    models = {
        "dense": write_model(tmp_path, "qwen3", **SIZES),
        "mixture": write_model(tmp_path, "qwen3_moe", **SIZES, **MIXTURE),
    }
    cases = {
        name: {
            "model": models[name.partition(" ")[0]],
            "tokens": TOKENS,
            "config": {"dtype": "bfloat16", "micro_batch_tokens": TOKENS, "ranks": ranks, **changed},
        }
        for name, changed in settings.items()
    }
    peaks = measure(ranks, tmp_path, cases)
    ratios = {name: round(estimate(case) / peaks[name], 3) for name, case in cases.items()}
    assert {name: ratio for name, ratio in ratios.items() if not 0.9 < ratio < 1.1} == {}, ratios
