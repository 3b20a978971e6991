from random import Random

import pytest

from penstock.datasets import EVERYDAY, LARGE, operands, random_expression
from penstock.datasets.arithmetic import in_range
from penstock.datasets.calculator import Profile


@pytest.mark.parametrize("profile", [LARGE, EVERYDAY])
def test_all_in_range_and_of_every_kind(profile: Profile) -> None:
    drawn = [random_expression(Random(7), profile)]
    rng = Random(7)
    drawn = [random_expression(rng, profile) for _ in range(3000)]
    assert all(in_range(text) for text in drawn)
    assert {len(operands(text)) for text in drawn} == {2, 3, 4}
    for sign in "+-*/.(":
        assert any(sign in text for text in drawn), sign


def test_brackets_never_span_the_whole() -> None:
    rng = Random(1)
    bracketed = [text for text in (random_expression(rng, LARGE) for _ in range(3000)) if "(" in text]
    assert not [text for text in bracketed if text[0] == "(" and text[-1] == ")"]
    assert any(text.endswith(")") for text in bracketed)
