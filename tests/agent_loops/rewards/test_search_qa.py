"""Exact match and F1 as Search-R1 and SQuAD compute them."""

from __future__ import annotations

import pytest

from penstock.agent_loops.rewards import exact_match, f1, normalised
from penstock.agent_loops.rewards.search_qa import word_f1

TRUTH = {"target": ["The Beatles", "Beatles, The"]}


def em(text: str, truth=TRUTH, extra=None) -> float:
    return exact_match("searchR1_nq", text, truth, extra)


def test_normalisation() -> None:
    assert normalised("  The  Beatles' (an English band)! ") == "beatles english band"
    assert normalised("A.B.C.") == "abc"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>the beatles!</answer>", 1.0),
        ("<answer>Queen</answer> no: <answer>\nBeatles\n</answer>", 1.0),
        ("<answer>Beatles</answer> no: <answer>Queen</answer>", 0.0),
        ("the Beatles", 0.0),
        ("<answer>the Beatles", 0.0),
        ("<answer>Beatles band</answer>", 0.0),
        ("<answer>Beatles</answer>" * 11, 0.25),
    ],
)
def test_exact_match(text: str, expected: float) -> None:
    assert em(text) == expected


def test_search_qa_reference_shapes() -> None:
    assert em("<answer>Paris</answer>", "Paris") == em("<answer>Paris</answer>", ["Rome", "paris"]) == 1.0
    for nothing in ({"target": []}, {}, None, {"target": [3]}):
        with pytest.raises(ValueError, match="no list of texts"):
            em("<answer>x</answer>", nothing)


def test_what_the_final_answer_tool_was_given_counts() -> None:
    assert em("<answer>Queen</answer>", extra={"final_answer": "The Beatles"}) == 1.0
    assert em("<answer>Queen</answer>", extra={"final_answer": None}) == 0.0


def test_f1_by_hand() -> None:
    """ "cat sat mat" against "cat sat there": 2 common words, P = R = 2/3; "cat" alone: P = 1, R = 1/3, F1 = 1/2."""
    assert word_f1("The cat sat. Mat", "a cat sat there") == pytest.approx(2 / 3)
    assert word_f1("cat", "cat sat there") == pytest.approx(0.5)
    assert word_f1("cat cat", "cat") == pytest.approx(2 / 3)
    assert word_f1("dog", "cat") == 0.0
    assert f1("x", "<answer>cat</answer>", {"target": ["cat sat there", "cat mat"]}) == pytest.approx(2 / 3)
    assert f1("x", "cat", {"target": ["cat"]}) == 0.0
