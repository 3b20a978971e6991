"""Mixtures of experts are published bucket by bucket from the ranks' own shards, whatever their number."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import expert_ranks
from safetensors.torch import load_file
from tests.tiny_model import save_tiny_model
from trainer_support import ENVIRONMENT

pytestmark = [pytest.mark.torch, pytest.mark.deep]
RANKS = 4
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "two experts each": ("Qwen3Moe", {**MOE, "num_experts": 8}),
    "2, 2, 1 and none": ("Qwen3Moe", {**MOE, "num_experts": 5}),
    "2, 2, 2 and 1": ("Qwen3Moe", {**MOE, "num_experts": 7}),
    "1, 1, 1 and none; tied": ("Qwen2Moe", {**MOE, "num_experts": 3, "tie_word_embeddings": True}),
    "other names": ("Mixtral", {"num_experts_per_tok": 2, "num_local_experts": 6}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {
        name: save_tiny_model(tmp_path_factory.mktemp("moe"), kind, **more) for name, (kind, more) in MODELS.items()
    }


@pytest.fixture(scope="module")
def shares(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """By model, the bytes that each of four ranks holds of a version."""
    folder = tmp_path_factory.mktemp("shares")
    command = [sys.executable, expert_ranks.__file__, str(RANKS), str(folder), *models.values()]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((folder / "shares.json").read_text())
    return {name: found[model] for name, model in models.items()}


@pytest.mark.parametrize("name", MODELS)
def test_no_rank_holds_more_than_its_share(name: str, models: dict[str, str], shares: dict[str, list[int]]) -> None:
    """The bytes themselves are compared in the ranks."""
    tensors = load_file(Path(models[name]) / "model.safetensors")
    bytes_of = {stored: 2 * tensor.numel() for stored, tensor in tensors.items()}
    experts = MODELS[name][1].get("num_experts") or MODELS[name][1]["num_local_experts"]
    of_experts = sum(nbytes for stored, nbytes in bytes_of.items() if ".experts." in stored)
    whole_rows = {stored: one for stored, one in tensors.items() if ".experts." not in stored}
    rows = sum(-(-len(one) // RANKS) * bytes_of[stored] // len(one) for stored, one in whole_rows.items())
    assert sum(shares[name]) == sum(bytes_of.values()), "each byte is on one rank"
    assert max(shares[name]) == rows + -(-experts // RANKS) * of_experts // experts
