"""The sum of the host's memory against what the kernel reports of a rank that writes a checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.deploy.preflight.preflight_support import RECIPE, REPOSITORY, write_model

from penstock.deploy import load_config
from penstock.deploy.preflight.memory import host_parts
from penstock.deploy.preflight.model_shape import model_shape

pytestmark = pytest.mark.torch
SIZES = {
    **{"hidden_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4},
    **{"head_dim": 128, "intermediate_size": 3072, "vocab_size": 512, "tie_word_embeddings": False},
}
"""26 million parameters: large enough that their states stand out in a process."""


def test_a_step_during_a_save_takes_the_states_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path, "qwen3", **SIZES)
    command = [sys.executable, str(REPOSITORY / "tests/trainer/saving_rank.py"), str(tmp_path), model]
    environment = {
        **os.environ,
        **{"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}"},
        "MALLOC_MMAP_THRESHOLD_": str(1 << 16),  # freed memory goes back at once, as that of a large model's tensors
    }
    subprocess.run(command, env=environment, check=True, timeout=300)
    report = json.loads((tmp_path / "resident.json").read_text())
    monkeypatch.setattr("penstock.deploy.run.plan.DRIVER", tmp_path)  # states are on the host beside a GPU
    monkeypatch.setattr("penstock.deploy.preflight.memory.PINNED", 1)  # and nothing is pinned without one
    config = load_config(RECIPE, [f"model={model}", "trainer.offload=true"])
    shape = model_shape(config)
    assert shape is not None
    parts = host_parts(config, shape)
    assert parts["trainer"] + parts["checkpoint"] == pytest.approx(report["saving"] - report["before"], rel=0.1)
