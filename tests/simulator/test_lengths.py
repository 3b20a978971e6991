"""Draws and their closed forms."""

from __future__ import annotations

import numpy as np
import pytest
from tests.simulator.conftest import cluster

from benchmarks.simulator.published import reaching
from penstock.simulator.config import LogNormal
from penstock.simulator.pipeline import slowest_ranks, train_s


@pytest.mark.parametrize("longest", [None, 500.0, 2000.0])
def test_the_mean_is_what_draws_come_to(longest: float | None) -> None:
    lengths = LogNormal(median=200, sigma=1.0, longest=longest)
    drawn = lengths.of(np.random.default_rng(0).standard_normal(400_000))
    assert lengths.mean == pytest.approx(float(drawn.mean()), rel=0.01)
    assert longest is None or drawn.max() <= longest


def test_one_draw_in_a_step_reaches_the_longest() -> None:
    """The rule for sources that state a maximum and nothing else."""
    lengths = reaching(28672, 8192, sigma=1.0)
    drawn = lengths.of(np.random.default_rng(1).standard_normal(8192 * 50))
    assert np.count_nonzero(drawn == 28672) / 50 == pytest.approx(1.0, abs=0.5)


def test_an_update_lasts_as_long_as_its_slowest_rank() -> None:
    """Two updates of two ranks: with one length for all, a quarter of the tokens each, whoever gets which."""
    assert slowest_ranks([3.0] * 8, 2, 2, False, (0,)) == [6.0, 6.0]
    trainer = cluster().trainer.model_copy(update={"ranks": 2, "tokens_per_s": 2.0, "update_fixed_s": 1.0})
    assert train_s(trainer, [3.0] * 8, 2, (0,)) == pytest.approx(2 * (6 / 2 + 1))
    assert train_s(trainer.model_copy(update={"scoring": 0.5}), [3.0] * 8, 2, (0,)) == pytest.approx(2 * (9 / 2 + 1))


def test_balanced_ranks_are_as_full_as_the_longest_or_the_mean() -> None:
    tokens = [8.0, 1.0, 1.0, 1.0, 1.0, 4.0]
    assert slowest_ranks(tokens, 1, 2, True, (0,)) == [8.0]
    assert slowest_ranks(tokens, 1, 2, False, (0,))[0] >= 8.0
    assert slowest_ranks(tokens, 1, 1, False, (0,)) == [pytest.approx(16.0)]
