"""Off-policy corrections by hand, and what holds for all of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from penstock.trainer.corrections import CORRECTIONS, Corrected, CorrectionInput

pytestmark = pytest.mark.torch
LEVELS = ("token", "sequence", "geometric")
RATIOS, SEGMENT = [1.5, 0.8, 4.0, 1.0], [0, 0, 1, 1]
"""Segment 0: product 1.2, mean √1.2 = 1.095; segment 1: product 4, mean 2."""
MEAN = math.sqrt(1.2)
BY_HAND: list[tuple[str, dict[str, Any], list[float]]] = [
    ("truncated_is", {"level": "token"}, [1.5, 0.8, 2.0, 1.0]),
    ("truncated_is", {"level": "sequence"}, [1.2, 1.2, 2.0, 2.0]),
    ("truncated_is", {"level": "geometric", "cap": 1.5}, [MEAN, MEAN, 1.5, 1.5]),
    ("masked_is", {}, [1.2, 1.2, 0.0, 0.0]),
    ("masked_is", {"level": "token"}, [1.5, 0.8, 0.0, 1.0]),
    ("icepop", {"low": 0.9, "high": 2.0}, [1.5, 0.0, 0.0, 1.0]),
    ("icepop", {}, RATIOS),
    ("rejection", {"high": 1.5}, [1.0, 1.0, 0.0, 0.0]),
    ("rejection", {"level": "token", "high": 1.5}, [1.0, 1.0, 0.0, 1.0]),
    ("rejection", {"level": "token", "low": 0.9}, [1.0, 0.0, 0.0, 1.0]),
]


def correct(name: str, ratios: list[float], segment: list[int], **options: Any) -> Corrected:
    behaviour = torch.full((len(ratios),), -2.0, dtype=torch.float64)
    proximal = behaviour + torch.tensor(ratios, dtype=torch.float64).log()
    return CORRECTIONS.bind(name, options)(CorrectionInput(proximal, behaviour, torch.tensor(segment)))


@pytest.mark.parametrize(("name", "options", "expected"), BY_HAND)
def test_correction_by_hand(name: str, options: dict[str, Any], expected: list[float]) -> None:
    found = correct(name, RATIOS, SEGMENT, **options)
    assert torch.where(found.kept, found.weights, 0.0).tolist() == pytest.approx(expected)
    assert name != "truncated_is" or found.kept.all()


@pytest.mark.parametrize("name", CORRECTIONS.names())
def test_nothing_is_corrected_where_both_policies_are_one(name: str) -> None:
    found = correct(name, [1.0] * 4, SEGMENT)
    assert found.weights.tolist() == [1.0] * 4
    assert found.kept.all()


@settings(max_examples=30)
@given(drawn=st.lists(st.tuples(st.floats(0.05, 20), st.integers(0, 2)), min_size=1, max_size=12))
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", CORRECTIONS.names())
def test_a_segment_is_corrected_as_if_it_were_alone(name: str, level: str, drawn: list[tuple[float, int]]) -> None:
    ratios, segment = [ratio for ratio, _ in drawn], [number for _, number in drawn]
    together = correct(name, ratios, segment, level=level)
    for number in set(segment):
        mine = [index for index, other in enumerate(segment) if other == number]
        alone = correct(name, [ratios[i] for i in mine], [0] * len(mine), level=level)
        torch.testing.assert_close(together.weights[mine], alone.weights)
        assert torch.equal(together.kept[mine], alone.kept)


@pytest.mark.parametrize("name", CORRECTIONS.names())
def test_absurd_ratios_stay_finite_and_no_token_is_no_correction(name: str) -> None:
    absurd = CorrectionInput(torch.tensor([0.0, -1e4]), torch.tensor([-1e4, 0.0]), torch.tensor([0, 1]))
    assert CORRECTIONS.get(name)(absurd).weights.isfinite().all()
    for level in LEVELS:
        nothing = CorrectionInput(torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.long))
        found = CORRECTIONS.bind(name, {"level": level})(nothing)
        assert (found.weights.shape, found.kept.shape) == ((0,), (0,)), level


@pytest.mark.parametrize(
    ("name", "options"),
    [("icepop", {"low": 1.0, "high": 1.0}), ("rejection", {"low": 1.0, "high": 1.0}), ("masked_is", {"cap": 1.0})],
)
def test_a_ratio_on_a_bound_is_kept(name: str, options: dict[str, float]) -> None:
    assert correct(name, [1.0, 1.0], [0, 1], **options).kept.tolist() == [True, True]


def test_logarithms_of_ratios_are_held_within_twenty() -> None:
    found = correct("icepop", [math.exp(25), math.exp(-25), math.exp(19)], [0, 1, 2], low=0.0, high=1e30)
    assert found.weights.tolist() == pytest.approx([math.exp(20), math.exp(-20), math.exp(19)])
