"""A version's file as SGLang is given it, and the checksums that it must tell; no SGLang is needed here."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from penstock.rollout_server.protocol import WeightsRefused

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from penstock.rollout_server.engines.sglang_weights import (  # noqa: E402 it needs torch
    as_folder,
    expected_checksums,
    first_difference,
)


def sha(*rows: list[float]) -> str:
    return hashlib.sha256(torch.tensor(rows).numpy().tobytes()).hexdigest()[:16]


def test_fused_parameters_are_stacked_in_sglangs_order() -> None:
    tensors = {f"m.0.attn.{part}_proj.weight": torch.tensor([[float(i)]]) for i, part in enumerate("vkq")}
    names = ["m.0.attn.qkv_proj.weight", "m.rotary.cache"]
    assert expected_checksums(tensors, names, "float32") == {"m.0.attn.qkv_proj.weight": sha([2.0], [1.0], [0.0])}


def test_checksums_are_of_the_engines_dtype() -> None:
    exact = expected_checksums({"w": torch.tensor([1.0, 2.0])}, ["w"], "bfloat16")
    rounded = expected_checksums({"w": torch.tensor([1.0001, 2.0])}, ["w"], "bfloat16")
    other = expected_checksums({"w": torch.tensor([1.1, 2.0])}, ["w"], "bfloat16")
    assert exact == rounded != other


def test_the_first_parameter_that_differs_is_named_missing_ones_too() -> None:
    assert first_difference({"a": "1", "b": "2"}, {"a": "1", "b": "2", "buffer": "3"}) is None
    assert first_difference({"a": "1", "b": "2"}, {"a": "1", "b": "3"}) == "b"
    assert first_difference({"a": "1", "b": "2"}, {"b": "2"}) == "a"


def test_a_file_that_the_trainer_deletes_meanwhile_is_read_to_its_end(tmp_path: Path) -> None:
    file = tmp_path / "weights-00000003.safetensors"
    file.write_bytes(b"version 3")
    with as_folder({"version": 3, "path": str(file)}, tmp_path) as folder:
        file.unlink()
        assert [path.read_bytes() for path in folder.glob("*.safetensors")] == [b"version 3"]
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with (
        pytest.raises(WeightsRefused, match=r"version 4: .*gone"),
        as_folder({"version": 4, "path": str(tmp_path / "gone")}, tmp_path),
    ):
        raise AssertionError("it was opened")
    assert list(tmp_path.iterdir()) == []
