"""Masks, bounds and levels of off-policy corrections, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from penstock.trainer.corrections import CORRECTIONS, Corrected, CorrectionInput

pytestmark = pytest.mark.torch
RATIOS, SEGMENT = [1.5, 0.8, 4.0, 1.0], [0, 0, 1, 1]
"""Segment 0: product 1.2, mean √1.2 = 1.095; segment 1: product 4, mean 2."""


def correct(name: str, ratios: list[float], segment: list[int], **options: Any) -> Corrected:
    behaviour = torch.full((len(ratios),), -2.0, dtype=torch.float64)
    proximal = behaviour + torch.tensor(ratios, dtype=torch.float64).log()
    return CORRECTIONS.bind(name, options)(CorrectionInput(proximal, behaviour, torch.tensor(segment)))


def applied(name: str, **options: Any) -> list[float]:
    found = correct(name, RATIOS, SEGMENT, **options)
    return torch.where(found.kept, found.weights, 0.0).tolist()


def test_truncation_by_level() -> None:
    assert applied("truncated_is", level="token") == pytest.approx([1.5, 0.8, 2.0, 1.0])
    assert applied("truncated_is", level="sequence") == pytest.approx([1.2, 1.2, 2.0, 2.0])
    mean = math.sqrt(1.2)
    assert applied("truncated_is", level="geometric", cap=1.5) == pytest.approx([mean, mean, 1.5, 1.5])


def test_masked_is_drops_what_truncation_keeps() -> None:
    assert applied("masked_is") == pytest.approx([1.2, 1.2, 0.0, 0.0])
    assert applied("masked_is", level="token") == pytest.approx([1.5, 0.8, 0.0, 1.0])


def test_icepop_has_two_bounds() -> None:
    assert applied("icepop", low=0.9, high=2.0) == pytest.approx([1.5, 0.0, 0.0, 1.0])
    assert applied("icepop") == pytest.approx(RATIOS)


def test_rejection_weighs_what_it_keeps_the_same() -> None:
    assert applied("rejection", high=1.5) == [1.0, 1.0, 0.0, 0.0]
    assert applied("rejection", level="token", high=1.5) == [1.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize("name", CORRECTIONS.names())
def test_nothing_is_corrected_where_both_policies_are_one(name: str) -> None:
    found = correct(name, [1.0] * 4, SEGMENT)
    assert found.weights.tolist() == [1.0] * 4
    assert found.kept.all()


@settings(max_examples=30)
@given(given_=st.lists(st.tuples(st.floats(0.05, 20), st.integers(0, 2)), min_size=1, max_size=12))
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("name", CORRECTIONS.names())
def test_a_segment_is_corrected_as_if_it_were_alone(name: str, level: str, given_: list[tuple[float, int]]) -> None:
    ratios, segment = [ratio for ratio, _ in given_], [number for _, number in given_]
    together = correct(name, ratios, segment, level=level)
    for number in set(segment):
        mine = [index for index, other in enumerate(segment) if other == number]
        alone = correct(name, [ratios[i] for i in mine], [0] * len(mine), level=level)
        torch.testing.assert_close(together.weights[mine], alone.weights)
        assert torch.equal(together.kept[mine], alone.kept)


@pytest.mark.parametrize("name", CORRECTIONS.names())
def test_absurd_ratios_stay_finite(name: str) -> None:
    given_ = CorrectionInput(torch.tensor([0.0, -1e4]), torch.tensor([-1e4, 0.0]), torch.tensor([0, 1]))
    assert CORRECTIONS.get(name)(given_).weights.isfinite().all()


@pytest.mark.parametrize(
    ("name", "options"),
    [("icepop", {"low": 1.0, "high": 1.0}), ("rejection", {"low": 1.0, "high": 1.0}), ("masked_is", {"cap": 1.0})],
)
def test_a_ratio_on_a_bound_is_kept(name: str, options: dict[str, float]) -> None:
    assert correct(name, [1.0, 1.0], [0, 1], **options).kept.tolist() == [True, True]


def test_ratios_are_held_within_twenty() -> None:
    """Of their logarithms."""
    found = correct("icepop", [math.exp(25), math.exp(-25), math.exp(19)], [0, 1, 2], low=0.0, high=1e30)
    assert found.weights.tolist() == pytest.approx([math.exp(20), math.exp(-20), math.exp(19)])


def test_no_token_is_no_correction() -> None:
    for name in CORRECTIONS.names():
        for level in ("token", "sequence", "geometric"):
            nothing = CorrectionInput(torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.long))
            found = CORRECTIONS.bind(name, {"level": level})(nothing)
            assert (found.weights.shape, found.kept.shape) == ((0,), (0,)), (name, level)
