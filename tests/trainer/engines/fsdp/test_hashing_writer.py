"""DCP's writer thread uses no GPU: all that it writes is on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem

from penstock.trainer import Ranks
from penstock.trainer.engines.fsdp.hashing_writer import HashingWriter

pytestmark = pytest.mark.torch


def test_save_on_a_machine_with_a_gpu_makes_no_overlapping_loader(
    monkeypatch: pytest.MonkeyPatch, ranks: Ranks, tmp_path: Path
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the writer thread made a CUDA stream on device 0")

    monkeypatch.setattr(filesystem, "_OverlappingCpuLoader", refuse)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    dcp.save({"weight": torch.ones(8)}, storage_writer=HashingWriter(tmp_path / "saved", ranks.rank))

    monkeypatch.undo()
    loaded = {"weight": torch.zeros(8)}
    dcp.load(loaded, checkpoint_id=tmp_path / "saved")
    assert torch.equal(loaded["weight"], torch.ones(8))
