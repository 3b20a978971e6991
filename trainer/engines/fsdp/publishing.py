"""What each FSDP rank has of a version: no rank gathers anything for it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as SplitRows

from penstock.trainer.engines.fsdp.lora import named_weights
from penstock.weight_sync import HubNames, Shard


def local_shards(model: nn.Module, names: HubNames, dtype: torch.dtype, rank: int, world: int) -> list[Shard] | None:
    """This rank's rows of every tensor; floating-point ones are published in `dtype`.

    None where a rank's part of a tensor is not a range of its rows: tensor parallelism splits columns as well, and the
    files have an expert's matrices, which the model keeps stacked.
    """
    found = []
    for name, tensor, _ in named_weights(model, None):
        stored = names.stored_name(name)
        if stored is None:
            return None
        shard = _shard(stored, tensor, dtype if tensor.is_floating_point() else tensor.dtype, rank, world)
        if shard is None:
            return None
        found.append(shard)
    return found


def _shard(name: str, tensor: Tensor, published: torch.dtype, rank: int, world: int) -> Shard | None:
    whole = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        nbytes = tensor.numel() * published.itemsize
        local = tensor if rank == 0 else tensor.new_empty(0)
        return Shard(name, whole, published, (nbytes, *[0] * (world - 1)), local)
    *copies, rows_split = tensor.placements
    mesh = tensor.device_mesh
    if rows_split != SplitRows(0) or not all(one.is_replicate() for one in copies) or mesh.size() != world:
        return None
    # Consecutive ranks hold all rows; the sets after the first one hold the same.
    shards = mesh.size(len(copies))
    row_bytes = math.prod(whole[1:]) * published.itemsize
    sizes = tuple(rows * row_bytes for rows in rows_of(whole[0], shards)) + (0,) * (world - shards)
    local = tensor.to_local()
    return Shard(name, whole, published, sizes, local if rank < shards else local[:0])


def rows_of(rows: int, world: int) -> list[int]:
    """How many of `rows` each rank has: as `torch.chunk` cuts, so that the last ones may have fewer or none."""
    each = -(-rows // world)
    return [max(0, min(rows, each * (rank + 1)) - each * rank) for rank in range(world)]
