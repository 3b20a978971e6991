"""Places of ranks that share copies of a model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.trainer.ranks.layout import RankLayout, RankPlace

SIZES = st.integers(1, 3)


def test_by_default_every_rank_is_a_replica() -> None:
    assert [RankLayout().place(rank, 3) for rank in range(3)] == [
        RankPlace(rank, 3, is_replica_leader=True, reports=True) for rank in range(3)
    ]


def test_two_tensor_ranks_two_stages_two_replicas() -> None:
    """megatron-core's order: tensor ranks are neighbours, stages are farthest apart."""
    places = [RankLayout(tensor=2, stages=2).place(rank, 8) for rank in range(8)]
    assert [place.replica for place in places] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [rank for rank, place in enumerate(places) if place.is_replica_leader] == [0, 2]
    assert [rank for rank, place in enumerate(places) if place.reports] == [4, 6]


@given(SIZES, SIZES, SIZES, SIZES)
def test_each_replica_has_all_its_ranks_and_one_speaker(tensor: int, context: int, stages: int, replicas: int) -> None:
    layout = RankLayout(tensor, context, stages)
    world = layout.ranks * replicas
    places = [layout.place(rank, world) for rank in range(world)]
    assert {place.replicas for place in places} == {replicas}
    for replica in range(replicas):
        assert sum(place.replica == replica for place in places) == layout.ranks
    assert [places[rank].replica for rank in layout.reporters(world)] == list(range(replicas))
    assert [place.replica for place in places if place.is_replica_leader] == list(range(replicas))


@pytest.mark.parametrize("world", [0, 1, 3, 5])
def test_ranks_that_are_no_whole_replicas_are_refused(world: int) -> None:
    with pytest.raises(ValueError, match="no whole number of replicas of 2 ranks"):
        RankLayout(tensor=2).place(0, world)
