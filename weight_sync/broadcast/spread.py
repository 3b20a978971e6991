"""A version whose ranks have no shards of their own: whole tensors come one after the other, each rank keeps a part.

With tensor parallelism, and between pipeline stages, what a rank holds is not a range of a tensor's bytes. There all
ranks put a tensor together, each keeps a range of it, and the next one comes: no host ever has more than its share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from penstock.weight_sync.broadcast.shards import Shard
from penstock.weight_sync.files.file_format import host_copy

PART_BYTES = 1 << 20
"""A tensor is cut into parts of at least so much. Smaller ones would cost rank 0 a question for few bytes."""


def spread_shards(
    tensors: Iterable[tuple[str, torch.Tensor]],
    published: torch.dtype,
    rank: int,
    world: int,
    part_bytes: int = PART_BYTES,
) -> Iterator[Shard]:
    """This rank's shard of every tensor, on the host; floating-point ones are cast to `published`.

    `tensors`: the same ones on all ranks, in the same order, whole, on any device and in any dtype. A tensor is let go
    before the next is asked for. Which rank keeps what follows from shapes and dtypes alone: the ranks that have least
    so far, so that shares differ by 2 × `part_bytes` at most.
    """
    share_bytes = [0] * world
    for name, tensor in tensors:
        dtype = published if tensor.is_floating_point() else tensor.dtype
        values = _cut(tensor.numel(), dtype.itemsize, share_bytes, part_bytes)
        begin = sum(values[:rank])
        own = host_copy(tensor.reshape(-1).narrow(0, begin, values[rank]), dtype)
        rank_bytes = tuple(count * dtype.itemsize for count in values)
        share_bytes = [before + nbytes for before, nbytes in zip(share_bytes, rank_bytes, strict=True)]
        shard = Shard(name, tuple(tensor.shape), dtype, rank_bytes, own)
        del tensor
        yield shard


def _cut(count: int, item_bytes: int, share_bytes: list[int], part_bytes: int) -> list[int]:
    """Return how many of a tensor's `count` values each rank keeps. `share_bytes`: what each rank has so far."""
    world = len(share_bytes)
    parts = max(1, min(world, count * item_bytes // part_bytes))
    keepers = sorted(sorted(range(world), key=lambda rank: share_bytes[rank])[:parts])
    bounds = [count * number // parts for number in range(parts + 1)]
    counts = [0] * world
    for keeper, begin, end in zip(keepers, bounds, bounds[1:], strict=False):
        counts[keeper] = end - begin
    return counts
