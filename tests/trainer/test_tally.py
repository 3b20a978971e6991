"""Sums that do not know how values were split."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from penstock.trainer.metrics import MetricAccumulator, Totals, exact_parts

NUMBERS = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e30, max_value=1e30)


@given(st.lists(NUMBERS, max_size=30))
def test_the_parts_of_a_sum_are_exact_and_few(values: list[float]) -> None:
    parts = exact_parts(values)
    assert sum(map(Fraction, parts)) == sum(map(Fraction, values))
    assert math.fsum(parts) == math.fsum(values)


@given(st.lists(NUMBERS, min_size=1, max_size=20), st.data())
def test_a_mean_has_the_same_bits_on_any_number_of_ranks(values: list[float], draws: st.DataObject) -> None:
    ranks = draws.draw(st.integers(1, 4))
    owner = [draws.draw(st.integers(0, ranks - 1)) for _ in values]
    shares = [[value for value, rank in zip(values, owner, strict=True) if rank == one] for one in range(ranks)]
    assert mean_of([values]) == mean_of(shares)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    found = mean_of([[1.0, bad], [2.0]])
    assert str(found) == str(bad)


class Gathered:
    """Takes what one rank would send."""

    world = 1

    def gather(self, value: dict) -> list[dict]:
        return [value]


def mean_of(shares: list[list[float]]) -> float:
    parts = []
    for share in shares:
        tally = MetricAccumulator()
        tally.add("x", share)
        parts.append({"sums": tally.reduce(Gathered())._sums, "counts": {}})  # type: ignore[arg-type]
    merged = {"x": [one for part in parts for one in part["sums"]["x"]]}
    totals = Totals([])
    totals._sums = merged
    return totals.mean("x")
