"""The sums of `penstock doctor` for a trainer's rank, against what torch and the kernel report of a real step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.deploy.preflight.preflight_support import MODEL

from penstock.deploy.preflight.memory import trainer_bytes
from penstock.deploy.preflight.model import read_config, read_weights
from penstock.deploy.preflight.model_shape import shape_of
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

def activations():
    weights, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}
    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    return sum(kept.values())

report["activations"] = activations()
model.gradient_checkpointing_enable({"use_reentrant": False})
report["recomputed"] = activations()
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
    assert sums["activations"] == pytest.approx(report["activations"], rel=0.4)
    again = trainer_bytes(shape, TrainerConfig(micro_batch_tokens=TOKENS, recompute=True), TOKENS, critic=False)
    # Of the layer whose backward it is, everything is there once.
    of_layer = sums["activations"] / shape.layers
    assert again["activations"] - of_layer == pytest.approx(report["recomputed"], rel=0.6)
