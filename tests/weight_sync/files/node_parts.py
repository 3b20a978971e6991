"""Versions that are published for the readers of one machine, and what these hold."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from tests.weight_sync.conftest import small_tensors

from penstock.weight_sync import Manifest, WeightPublisher
from penstock.weight_sync.files.node_copy import VersionLease, lease_name


def published(folder: Path, version: int = 1, seed: int = 0, **settings: Any) -> Manifest:
    """Files of tests that run at the same time have seeds of their own: a lease is known by what is in the version."""
    return WeightPublisher(folder, "shm", **settings).write(version, small_tensors(seed).items())


def check_holds(memory: Any, tensors: dict[str, Any]) -> None:
    assert sorted(memory) == sorted(tensors)
    for name, tensor in tensors.items():
        assert memory[name].dtype == tensor.dtype
        assert torch.equal(memory[name], tensor), name


def check_is_free(what: str) -> None:
    """The lease, soon."""
    give_up_at = time.monotonic() + 60
    while (lease := VersionLease.take(lease_name(what))) is None:
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
    lease.close()
