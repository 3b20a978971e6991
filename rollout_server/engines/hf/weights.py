"""A version's way into the hf engine's model, tensor by tensor; and the model without weights in the trainer's turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from penstock.weight_sync import Manifest, WeightsRefused, checksum, dtype_name


@dataclass(frozen=True, slots=True)
class Copy:
    """One tensor that is ready to go into the model."""

    name: str
    target: torch.Tensor
    source: torch.Tensor
    """Same shape and dtype as `target`."""
    xxh3: str
    """Checksum that `target` must have afterwards."""

    def run(self) -> None:
        with torch.no_grad():
            self.target.copy_(self.source)

    def landed(self) -> bool:
        return checksum(self.target) == self.xxh3


def plan_copies(model: torch.nn.Module, manifest: Manifest, host: Mapping[str, torch.Tensor]) -> list[Copy]:
    """Copies that fill every tensor of the model's state exactly once. Raises `WeightsRefused` naming the tensor.

    Tied tensors (one storage, several names) may come under any of their names, or under all if they agree.
    """
    announced, targets = manifest.entries, model.state_dict()
    version = manifest.version
    copies: dict[int, Copy] = {}
    for name, source in host.items():
        if name not in targets:
            raise WeightsRefused(f"version {version}: the model has no tensor {name!r}")
        xxh3 = announced[name].xxh3 if name in announced else checksum(source)  # joined from several that were verified
        copy = _plan_one(version, name, targets[name], source, xxh3)
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


class OffloadedWeights:
    """A model's parameters in the trainer's turn: moved to host memory (a no-op if they are there), or dropped."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._shapes = [parameter.shape for parameter in self._parameters]
        self.weight_bytes = sum(parameter.nbytes for parameter in self._parameters)
        self._away = False
        self.dropped = False
        """The parameters hold no weights."""

    @property
    def held_bytes(self) -> int:
        return 0 if self._away else self.weight_bytes

    def give_up(self, *, drop: bool) -> None:
        """Nothing is computed meanwhile."""
        self._away, self.dropped = True, self.dropped or drop
        for parameter in self._parameters if drop else ():
            parameter.data = parameter.data.new_empty(0)

    def take_back(self) -> None:
        self._away = False
        for parameter, shape in zip(self._parameters, self._shapes, strict=True) if self.dropped else ():
            parameter.data = parameter.data.new_empty(shape)
