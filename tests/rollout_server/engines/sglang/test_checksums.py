"""Checksums as SGLang computes them, on CPUs and GPUs; no SGLang is needed here."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from tests.rollout_server.engines.sglang.sglang_hashes import bytes_of

torch = pytest.importorskip("torch")

from penstock.rollout_server.engines.sglang import checksums
from penstock.rollout_server.engines.sglang.checksums import device_checksum, expected_checksums, first_difference
from penstock.rollout_server.engines.sglang.server import SGLANG

pytestmark = pytest.mark.torch
PROGRAM = Path(__file__).with_name("sglang_hashes.py")
RECORD: dict[str, str] = json.loads(PROGRAM.with_suffix(".json").read_text())


def sha(*rows: list[float]) -> str:
    return hashlib.sha256(torch.tensor(rows).numpy().tobytes()).hexdigest()[:16]


def test_fused_parameters_are_stacked_in_sglangs_order() -> None:
    tensors = {f"m.0.attn.{part}_proj.weight": torch.tensor([[float(i)]]) for i, part in enumerate("vkq")}
    names = ["m.0.attn.qkv_proj.weight", "m.rotary.cache"]
    assert expected_checksums(tensors, names, "float32", on_device=False) == {
        "m.0.attn.qkv_proj.weight": sha([2.0], [1.0], [0.0])
    }


def test_checksums_are_of_the_engines_dtype() -> None:
    exact = expected_checksums({"w": torch.tensor([1.0, 2.0])}, ["w"], "bfloat16", on_device=False)
    rounded = expected_checksums({"w": torch.tensor([1.0001, 2.0])}, ["w"], "bfloat16", on_device=False)
    other = expected_checksums({"w": torch.tensor([1.1, 2.0])}, ["w"], "bfloat16", on_device=False)
    assert exact == rounded != other


def test_the_first_parameter_that_differs_is_named_missing_ones_too() -> None:
    assert first_difference({"a": "1", "b": "2"}, {"a": "1", "b": "2", "buffer": "3"}) is None
    assert first_difference({"a": "1", "b": "2"}, {"a": "1", "b": "3"}) == "b"
    assert first_difference({"a": "1", "b": "2"}, {"b": "2"}) == "a"


@pytest.mark.parametrize("size", RECORD)
@pytest.mark.parametrize("piece_tiles", [1, 2, 4])
def test_the_sum_of_a_gpu_is_that_of_sglangs_kernel(
    size: str, piece_tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums, "PIECE", piece_tiles * checksums.TILE)
    assert device_checksum(np.frombuffer(bytes_of(int(size)), np.uint8)) == RECORD[size]


def test_one_other_byte_is_another_sum() -> None:
    data = np.frombuffer(bytes_of(40_001), np.uint8).copy()
    before = device_checksum(data)
    data[-1] ^= 1
    assert device_checksum(data) != before


@pytest.mark.sglang
def test_the_record_is_of_the_kernel_that_is_installed_here() -> None:
    python = SGLANG.find_python(None)
    done = subprocess.run(
        [python, PROGRAM], env={**os.environ, "TRITON_INTERPRET": "1"}, stdout=subprocess.PIPE, check=True
    )
    assert json.loads(done.stdout) == RECORD
