"""The states of a trainer's rank in the sums of `penstock doctor`, against what torch and the kernel report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.deploy.preflight.preflight_support import MODEL

from penstock.deploy.preflight.model import read_config, read_weights
from penstock.deploy.preflight.model_shape import shape_of
from penstock.deploy.preflight.rank_memory import trainer_bytes
from penstock.trainer import TrainerConfig

pytestmark = pytest.mark.torch
TOKENS = 256
LARGER = {"hidden_size": 768, "intermediate_size": 2048, "vocab_size": 512}
"""Large enough that the states of the shipped model stand out in a process."""
STEP = """
import json, resource, sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

folder, tokens = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), attn_implementation="sdpa")
model.save_pretrained(folder)
ids = torch.randint(0, 512, (1, tokens))
model.train()
before = resident()
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
model(input_ids=ids[:, :8], use_cache=False).logits.sum().backward()
optimizer.step()
report = {"grown": resident() - before}
learning = [p for p in model.parameters() if p.grad is not None]
moments = (value for one in optimizer.state.values() for value in one.values() if value.dim())
report["states"] = sum(p.nbytes + p.grad.nbytes for p in learning) + sum(value.nbytes for value in moments)
print(json.dumps(report))
"""


def test_a_rank_takes_the_bytes_that_torch_and_the_kernel_report(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**read_config(MODEL), **LARGER}))
    command = [sys.executable, "-c", STEP, str(tmp_path), str(TOKENS)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stderr
    report, weights = json.loads(ended.stdout), read_weights(tmp_path)
    assert weights is not None
    shape = shape_of(read_config(tmp_path), weights)
    assert shape is not None
    sums = trainer_bytes(shape, TrainerConfig(micro_batch_tokens=TOKENS), TOKENS, critic=False)
    assert sums["weights"] + sums["gradients"] + sums["moments"] == pytest.approx(report["states"], rel=1e-3)
    assert sums["gradients"] + sums["moments"] == pytest.approx(report["grown"], rel=0.3)
