"""Bytes are counted on the device of the module, on a machine with a GPU too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.support.meter import peak_bytes

pytestmark = pytest.mark.torch


def test_peak_of_a_module_on_the_cpu_is_counted_there_on_a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(64, 64)
    rows = torch.ones(1000, 64)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("synchronize", "reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)

    assert 1 <= peak_bytes(lambda: module(rows).sum().backward(), module) / (rows.numel() * 4) < 4
