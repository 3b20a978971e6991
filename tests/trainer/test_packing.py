"""Packs: whole rows, within the budget, positions from 0, predictors one before their targets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from penstock.trainer.batch import ModelLimits, make_row
from penstock.trainer.packing import join_rows, pack_rows, split_by_budget

pytestmark = pytest.mark.torch


@given(st.lists(st.integers(1, 300), max_size=40), st.integers(50, 250))
def test_every_row_is_in_one_pack_and_only_single_rows_pass_the_budget(lengths: list[int], budget: int) -> None:
    packs = split_by_budget(lengths, budget)
    assert sorted(index for pack in packs for index in pack) == list(range(len(lengths)))
    assert all(len(pack) == 1 or sum(lengths[i] for i in pack) <= budget for pack in packs)


def test_falling_length_first_fit_by_hand() -> None:
    assert split_by_budget([30, 70, 50, 20, 40], 100) == [[1, 0], [2, 4], [3]]


def test_the_layout_of_a_pack() -> None:
    import numpy as np
    from trainer_support import make_segment

    rng = np.random.default_rng(0)
    segments = [make_segment(rng, 0, prompt=2, response=6), make_segment(rng, 0, prompt=3, response=6)]
    limits = ModelLimits(context=16, vocab=64)
    rows = [make_row(5 + n, s, "", step=1, bound=2, model=limits) for n, s in enumerate(segments)]
    pack = join_rows(rows)
    assert pack.row_bounds.tolist() == [0, 8, 17]
    assert pack.positions.tolist() == [*range(8), *range(9)]
    assert pack.predictors.tolist() == [1, 2, 4, 5, 6, 10, 11, 13, 14, 15]
    assert pack.targets.tolist() == pack.ids[pack.predictors + 1].tolist()
    assert pack.episode.tolist() == [5] * 5 + [6] * 5
    assert pack.staleness.tolist() == [1] * 10
    assert len(pack_rows(rows, budget=10)) == 2
