"""The part of a version on each FSDP rank: no rank gathers anything for it.

A parameter lies over the ranks by its rows, whole ones on each:

    a matrix [R, C]             a rank's rows are a range of the tensor's bytes
    experts stacked [E, …]      a row is one expert: each of its tensors in the files is one rank's, whole

Under expert parallelism rows do not follow each other in the order of the ranks (`_rows`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from penstock.trainer.engines.fsdp.experts import DIMENSION
from penstock.trainer.engines.fsdp.lora import LowRank, merged, merged_part, named_weights
from penstock.weight_sync import HubNames, Shard, host_copy


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
    rows: Mapping[int, int]
    """Number of rows by rank, in the order of the rows."""
    world: int
    rank: int
    local: Tensor
    published: torch.dtype

    def shard(self, stored: str) -> Shard:
        """Return the shard of a parameter that the files have whole."""
        row_bytes = math.prod(self.shape[1:]) * self.published.itemsize
        sizes = tuple(self.rows.get(rank, 0) * row_bytes for rank in range(self.world))
        return Shard(stored, self.shape, self.published, sizes, self.local, tuple(self.rows))

    def expert_shards(self, names: HubNames, name: str) -> Iterator[Shard]:
        """Every rank names the tensors of all experts, in one order, each whole on the rank of its expert."""
        owners = [owner for owner, rows in self.rows.items() for _ in range(rows)]
        own = dict(names.split_experts(name, self.local, owners.index(self.rank) if len(self.local) else 0))
        whole = torch.empty(self.shape, dtype=self.local.dtype, device="meta")
        shapes = {stored: tuple(tensor.shape) for stored, tensor in names.split_experts(name, whole, 0)}
        for owner, stored in zip(owners, names.experts(name) or (), strict=True):
            for one in stored:
                sizes = [0] * self.world
                sizes[owner] = math.prod(shapes[one]) * self.published.itemsize
                local = own.get(one, self.local.new_empty(0))
                yield Shard(one, shapes[one], self.published, tuple(sizes), local)


def _part(tensor: Tensor, published: torch.dtype, rank: int, world: int) -> _Part | None:
    """None if it is not a range of rows. What every rank has whole is rank 0's."""
    whole = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        rows = {0: whole[0] if whole else 1}
        local = tensor.detach() if rank == 0 else tensor.new_empty(0, *whole[1:])
    else:
        if any(getattr(one, "dim", 0) for one in tensor.placements) or "tensor" in _dimensions(tensor):
            return None
        rows = _rows(tensor)
        local = tensor.to_local().detach()
    return _Part(whole, rows, world, rank, local if rank in rows else local[:0], published)


def _dimensions(tensor: DTensor) -> dict[str, int]:
    return dict(zip(tensor.device_mesh.mesh_dim_names or (), tensor.device_mesh.shape, strict=True))


def _rows(tensor: DTensor) -> dict[int, int]:
    """Rank → how many rows it has, in their order. Consecutive ranks hold all of them; the sets after the first one
    hold the same. Under expert parallelism FSDP lays each rank's part of the experts over the shards."""
    sizes = _dimensions(tensor)
    shards, parts = sizes["shards"], sizes.get(DIMENSION, 1)
    each = rows_of(len(tensor) // parts, shards)
    return {shard * parts + part: each[shard] for part in range(parts) for shard in range(shards)}


@torch.no_grad()
def host_weight(tensor: Tensor, change: LowRank | None, dtype: torch.dtype, rank: int) -> Tensor | None:
    """Return the weight with its change in `dtype`, whole, on rank 0's host; None on other ranks. A collective.

    Of experts that ranks share out, no device ever has more than one rank's rows.
    """
    if not isinstance(tensor, DTensor) or DIMENSION not in _dimensions(tensor):
        full = merged(tensor, change)
        return host_copy(full, dtype) if rank == 0 else None
    whole = torch.empty(tensor.shape, dtype=dtype) if rank == 0 else None
    local, first = merged_part(tensor, change), 0
    for owner, count in _rows(tensor).items():
        rows = local.new_empty(count, *tensor.shape[1:], dtype=dtype)
        if rank == owner:
            rows.copy_(local)
        if count:
            dist.broadcast(rows, owner)
        if whole is not None:
            whole[first : first + count].copy_(rows)
        first += count
    return whole


def rows_of(rows: int, world: int) -> list[int]:
    """Return how many of `rows` each rank has: as `torch.chunk` cuts, so that the last ones may have fewer or none."""
    each = -(-rows // world)
    return [max(0, min(rows, each * (rank + 1)) - each * rank) for rank in range(world)]
