"""Does an engine hold what was published? Its parameters against the verified tensors, value by value.

Engines fuse and drop parameters: rows of several published tensors are stacked in one, output heads are tied,
vocabularies are padded, and layers whose kernel wants another layout keep a packed copy only. What still has the
published values in their order is compared; the rest is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Engines' parameter of → the checkpoint's, in the order in which their rows are stacked."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of an engine's parameters."""

    equal: int
    incomparable: int
    """Split over ranks, packed, or unknown to the version."""
    different: str = ""
    """The first one that holds other values, in the engine's own name."""


def parts_of(name: str) -> tuple[str, ...]:
    """The published tensors that an engine's parameter is made of; itself where it is not fused."""
    for fused, parts in _FUSED.items():
        if f".{fused}." in name:
            return tuple(name.replace(f".{fused}.", f".{part}.") for part in parts)
    return (name,)


def compare_held(parameters: Iterable[tuple[str, torch.Tensor]], published: Mapping[str, torch.Tensor]) -> Comparison:
    """Ends at the first difference. Reads only; published values are rounded to the parameter's dtype."""
    equal = incomparable = 0
    for name, held in parameters:
        wanted = _wanted(name, held, published)
        if wanted is None:
            incomparable += 1
        elif torch.equal(held.detach()[: len(wanted)].cpu(), wanted):
            equal += 1
        else:
            return Comparison(equal, incomparable, name)
    return Comparison(equal, incomparable)


def _wanted(name: str, held: torch.Tensor, published: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """What the first rows must be; None where the parameter is not of the same form."""
    parts = [published[part] for part in parts_of(name) if part in published]
    if len(parts) < len(parts_of(name)) or not held.ndim:
        return None
    rows = sum(len(part) for part in parts if part.ndim)
    # More rows are padding of the vocabulary; fewer are one rank's share.
    if any(part.shape[1:] != held.shape[1:] for part in parts) or not 0 < rows <= len(held):
        return None
    return torch.cat([part.to(held.dtype) for part in parts])
