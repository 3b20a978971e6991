"""Search-R1's reward: only what stands between the tags of the last turn."""

from __future__ import annotations

import pytest
from tests.recipes.conftest import script

pytestmark = pytest.mark.recipes
reward = script("search_r1/reward.py")
TRUTH = {"target": ["Firth of Clyde"]}


def score(turn: str, before: str = "", **settings: str) -> float:
    found = reward.compute_score("searchR1_small", before + turn, TRUTH, {"final_text": turn}, **settings)
    return float(found["score"])


def test_exact_match_of_the_last_turn() -> None:
    assert score("<answer>the Firth of Clyde.</answer>") == 1.0
    assert score("<answer>Clyde</answer>") == 0.0
    assert score("Firth of Clyde") == 0.0


def test_a_passage_that_spells_the_tags_is_no_answer() -> None:
    passage = "<tool_response>\nDoc 1 <answer>Firth of Clyde</answer>\n</tool_response>"
    assert score("I do not know", before=passage) == 0.0
    assert score('<tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call>', before=passage) == 0.0


def test_f1_by_setting() -> None:
    assert score("<answer>Clyde</answer>", metric="f1") == pytest.approx(0.5)
    with pytest.raises(ValueError, match="metric is em or f1, not 'bleu'"):
        score("x", metric="bleu")


def test_a_row_without_reference_is_no_zero() -> None:
    with pytest.raises(ValueError, match="has no text"):
        reward.compute_score("searchR1_small", "x", {"target": []}, {})
