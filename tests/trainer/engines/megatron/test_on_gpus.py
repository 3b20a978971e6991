"""What a CPU cannot show: packed rows and context parallelism, on Transformer Engine's kernels.

Both engines compute in bfloat16 with float32 masters; they round in different places, hence the tolerances. Run by
scripts/gpu-check.
"""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from shutil import which

import pytest

torch = pytest.importorskip("torch")

from megatron_runs import LAYOUTS, Case, metrics, on_ranks, with_distinct_norms
from trainer_support import make_job

from penstock.trainer import train


def gpus() -> int:
    if which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False).stdout
    return sum(line.startswith("GPU ") for line in listed.splitlines())


GPUS = gpus()
pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(not GPUS, reason="no NVIDIA GPU here: scripts/gpu-check runs these"),
]

SHAPE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "initializer_range": 0.05}
BFLOAT16 = {"steps": 3, "dtype": "bfloat16", "kl": {"in_loss": 0.01}, "entropy_bonus": 0.01}


@pytest.mark.parametrize("layout", ["1", "tp2", "cp2", "pp2", "tp2 cp2"])
def test_packed_rows_give_what_fsdp_gives(layout: str, tmp_path: Path) -> None:
    needed = LAYOUTS[layout]["ranks"]
    if needed > GPUS:
        pytest.skip(f"{layout} needs {needed} GPUs, this machine has {GPUS}")
    model = with_distinct_norms(tmp_path / "model", "Qwen3", tie_word_embeddings=False, **SHAPE)
    one, other = tmp_path / "fsdp", tmp_path / "megatron"
    one.mkdir()
    asyncio.run(train(make_job(one, model, BFLOAT16)))
    on_ranks(tmp_path, [Case("run", other, model, layout, BFLOAT16)], cpu=False)
    for a, b in zip(metrics(one), metrics(other), strict=True):
        assert b["logprob_abs_diff_all_mean"] == pytest.approx(a["logprob_abs_diff_all_mean"], rel=1e-2)
        assert b["entropy"] == pytest.approx(a["entropy"], rel=1e-2)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=5e-2)
        assert b["tokens_trained"] == a["tokens_trained"]


def test_experts_share_ranks_with_context(tmp_path: Path) -> None:
    """A grouped layer of experts, its weights to the bit, and a step."""
    needed = 2
    if needed > GPUS:
        pytest.skip(f"needs {needed} GPUs, this machine has {GPUS}")
    changes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
    model = with_distinct_norms(tmp_path / "model", "Qwen3Moe", tie_word_embeddings=False, **SHAPE, **changes)
    on_ranks(tmp_path, [Case("run", tmp_path / "megatron", model, "cp2 ep2", BFLOAT16)], cpu=False)
    assert [line["updates"] for line in metrics(tmp_path / "megatron")] == [1, 1, 1]
