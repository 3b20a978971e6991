"""Whole tensors that come one after the other: each rank keeps its share of the bytes, and no rank keeps more."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.weight_sync import Shard, WeightSource, spread_shards

pytestmark = pytest.mark.torch
PART_BYTES = 64


def spread(tensors: list[Any], published: Any, world: int) -> list[list[Shard]]:
    """By rank."""
    named = [(f"t{number}", tensor) for number, tensor in enumerate(tensors)]
    return [list(spread_shards(iter(named), published, rank, world, PART_BYTES)) for rank in range(world)]


@given(
    shapes=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=12),
    world=st.integers(1, 5),
    published=st.sampled_from(["float32", "bfloat16"]),
)
@settings(max_examples=25)
def test_shares_are_the_tensors_and_about_equal(shapes: list[tuple[int, int]], world: int, published: str) -> None:
    dtype = getattr(torch, published)
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    by_rank = spread(tensors, dtype, world)
    for tensor, parts in zip(tensors, zip(*by_rank, strict=True), strict=True):
        assert len({(part.name, part.shape, part.published, part.rank_bytes) for part in parts}) == 1, "all agree"
        assert (parts[0].shape, parts[0].published) == (tensor.shape, dtype)
        assert parts[0].rank_bytes == tuple(part.local.nbytes for part in parts)
        assert torch.equal(torch.cat([part.local for part in parts]), tensor.reshape(-1).to(dtype))
    kept = [sum(part.local.nbytes for part in own) for own in by_rank]
    assert max(kept) - min(kept) <= 2 * PART_BYTES + dtype.itemsize * len(tensors)


@pytest.mark.parametrize("world", [2, 4])
def test_a_large_tensor_is_on_all_ranks_and_a_small_one_on_one(world: int) -> None:
    large, small = spread([torch.ones(world, 100), torch.ones(20), torch.ones(20)], torch.bfloat16, world)[0], 40
    assert large[0].rank_bytes == (200,) * world
    assert [shard.rank_bytes.index(small) for shard in large[1:]] == [0, 1]
    assert [sum(shard.rank_bytes) for shard in large[1:]] == [small, small]


def test_a_tensor_is_copied_let_go_and_cast_where_it_has_a_point() -> None:
    alive: list[Any] = []

    def tensors() -> Iterator[tuple[str, Any]]:
        for number in range(3):
            assert [one() for one in alive] == [None] * number, "one at a time"
            tensor = torch.full((8,), float(number), requires_grad=True)
            alive.append(weakref.ref(tensor))
            yield f"t{number}", tensor
            del tensor
        yield "steps", torch.arange(5)

    shards = list(spread_shards(tensors(), torch.float32, 0, 1))
    assert [shard.local.tolist() for shard in shards[:3]] == [[0.0] * 8, [1.0] * 8, [2.0] * 8]
    assert not any(shard.local.requires_grad for shard in shards)
    assert (shards[3].published, shards[3].local.tolist()) == (torch.int64, [0, 1, 2, 3, 4])


def test_a_source_streams_what_one_rank_has_all_of() -> None:
    tensors = [torch.randn(7, 3), torch.arange(4), torch.randn(5)]
    source = WeightSource()
    source.take(1, spread(tensors, torch.bfloat16, 1)[0])
    assert [tensor.name for tensor in source.tensors] == ["t1", "t0", "t2"], "larger items first"
    stream = torch.cat([bucket.clone() for bucket in source.buckets(1, 16)])
    expected = [tensors[1], tensors[0].bfloat16(), tensors[2].bfloat16()]
    assert torch.equal(stream, torch.cat([one.reshape(-1).view(torch.uint8) for one in expected]))
