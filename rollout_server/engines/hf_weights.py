"""New weights into a transformers model, in place, tensor by tensor, checked before and after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from penstock.weight_sync import WeightsRefused, checksum, dtype_name, entries


@dataclass(frozen=True, slots=True)
class Copy:
    """One tensor that is ready to go into the model."""

    name: str
    target: torch.Tensor
    source: torch.Tensor
    """Same shape and dtype as `target`."""
    xxh3: str
    """What `target` must hold afterwards."""

    def run(self) -> None:
        with torch.no_grad():
            self.target.copy_(self.source)

    def landed(self) -> bool:
        return checksum(self.target) == self.xxh3


def plan_copies(model: torch.nn.Module, manifest: Mapping[str, Any], host: Mapping[str, torch.Tensor]) -> list[Copy]:
    """Copies that fill every tensor of the model's state exactly once. Raises `WeightsRefused` naming the tensor.

    Tied tensors (one storage, several names) may come under any of their names, or under all if they agree.
    """
    wanted, targets = entries(manifest), model.state_dict()
    version = manifest["version"]
    copies: dict[int, Copy] = {}
    for name, source in host.items():
        if name not in targets:
            raise WeightsRefused(f"version {version}: the model has no tensor {name!r}")
        copy = _plan_one(version, name, targets[name], source, wanted[name]["xxh3"])
        twin = copies.setdefault(targets[name].data_ptr(), copy)
        if twin.xxh3 != copy.xxh3:
            raise WeightsRefused(f"version {version}: tensors {twin.name!r} and {name!r} are tied but differ")
    for name, target in targets.items():
        if target.data_ptr() not in copies:
            raise WeightsRefused(f"version {version}: tensor {name!r} is missing")
    return list(copies.values())


def _plan_one(version: int, name: str, target: torch.Tensor, source: torch.Tensor, xxh3: str) -> Copy:
    if target.shape != source.shape:
        raise WeightsRefused(
            f"version {version}: tensor {name!r} has shape {list(source.shape)}, the model's is {list(target.shape)}"
        )
    if target.dtype == source.dtype:
        return Copy(name, target, source, xxh3)
    if not (target.is_floating_point() and source.is_floating_point()):
        raise WeightsRefused(f"version {version}: tensor {name!r} is {dtype_name(source.dtype)}, the model's is not")
    rounded = source.to(target.dtype)
    return Copy(name, target, rounded, checksum(rounded))
