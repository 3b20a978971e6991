"""Input of a `WeightSource`, and its description of a version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock.weight_sync.files.delta import Gaps
from penstock.weight_sync.files.file_format import dtype_name


@dataclass(frozen=True, slots=True)
class Shard:
    """One tensor of a version, and this rank's part of it."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    published: torch.dtype
    rank_bytes: tuple[int, ...]
    """Bytes that each rank has of it, in `published`: the parts in `order` are the tensor's bytes."""
    local: torch.Tensor
    """This rank's part, on any device and in any dtype. Not touched after `WeightSource.take`."""
    order: tuple[int, ...] = ()
    """Ranks in the order of their parts; empty: ascending."""

    @property
    def dtype(self) -> str:
        return dtype_name(self.published)


class Superseded(Exception):
    """A rank holds the next version already."""


@dataclass(frozen=True, slots=True)
class VersionChanges:
    """The sizes of a version's changes."""

    base: int
    """The version before."""
    gaps: Sequence[Gaps]
    """Gaps of each tensor, in the stream's order."""
