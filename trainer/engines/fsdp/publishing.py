"""The part of a version on each FSDP rank: no rank gathers anything for it.

A parameter lies over the ranks by its rows, whole ones on each:

    a matrix [R, C]             a rank's rows are a range of the tensor's bytes
    experts stacked [E, …]      a row is one expert: each of its tensors in the files is one rank's, whole
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as SplitRows

from penstock.trainer.engines.fsdp.lora import named_weights
from penstock.weight_sync import HubNames, Shard


def local_shards(model: nn.Module, names: HubNames, dtype: torch.dtype, rank: int, world: int) -> list[Shard] | None:
    """This rank's part of every tensor of the files, views of its parameters; floating-point ones are published in
    `dtype`.

    None if some part is not a range of a tensor's bytes: tensor parallelism splits columns as well, and there are
    parameters other than experts that the files have in several tensors.
    """
    shards: list[Shard] = []
    for name, tensor, _ in named_weights(model, None):
        published = dtype if tensor.is_floating_point() else tensor.dtype
        part = _part(tensor, published, rank, world)
        if part is None:
            return None
        if (stored := names.stored_name(name)) is not None:
            shards.append(part.shard(stored))
        elif names.experts(name) is not None:
            shards += part.expert_shards(names, name)
        else:
            return None
    return shards


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows of one parameter on this rank."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    rows: tuple[int, ...]
    """Number of rows by rank."""
    rank: int
    local: Tensor
    published: torch.dtype

    def shard(self, stored: str) -> Shard:
        """Return the shard of a parameter that the files have whole."""
        row_bytes = math.prod(self.shape[1:]) * self.published.itemsize
        return Shard(stored, self.shape, self.published, tuple(rows * row_bytes for rows in self.rows), self.local)

    def expert_shards(self, names: HubNames, name: str) -> Iterator[Shard]:
        """Every rank names the tensors of all experts, in one order, each whole on the rank of its expert."""
        own = dict(names.split_experts(name, self.local, sum(self.rows[: self.rank])))
        whole = torch.empty(self.shape, dtype=self.local.dtype, device="meta")
        owners = [owner for owner, rows in enumerate(self.rows) for _ in range(rows)]
        shapes = {stored: tuple(tensor.shape) for stored, tensor in names.split_experts(name, whole, 0)}
        for owner, stored in zip(owners, names.experts(name) or (), strict=True):
            for one in stored:
                sizes = [0] * len(self.rows)
                sizes[owner] = math.prod(shapes[one]) * self.published.itemsize
                local = own.get(one, self.local.new_empty(0))
                yield Shard(one, shapes[one], self.published, tuple(sizes), local)


def _part(tensor: Tensor, published: torch.dtype, rank: int, world: int) -> _Part | None:
    """None if it is not a range of rows. What every rank has whole is rank 0's."""
    whole = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        rows = (whole[0] if whole else 1, *[0] * (world - 1))
        return _Part(whole, rows, rank, tensor.detach() if rank == 0 else tensor.new_empty(0, *whole[1:]), published)
    *copies, rows_split = tensor.placements
    mesh = tensor.device_mesh
    if rows_split != SplitRows(0) or not all(one.is_replicate() for one in copies) or mesh.size() != world:
        return None
    # Consecutive ranks hold all rows; the sets after the first one hold the same.
    shards = mesh.size(len(copies))
    rows = (*rows_of(whole[0], shards), *[0] * (world - shards))
    local = tensor.to_local().detach()
    return _Part(whole, rows, rank, local if rank < shards else local[:0], published)


def rows_of(rows: int, world: int) -> list[int]:
    """Return how many of `rows` each rank has: as `torch.chunk` cuts, so that the last ones may have fewer or none."""
    each = -(-rows // world)
    return [max(0, min(rows, each * (rank + 1)) - each * rank) for rank in range(world)]
