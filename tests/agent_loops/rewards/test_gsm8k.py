"""GSM8K: real reference answers where they are there, and the forms in which models write numbers."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from penstock.agent_loops.rewards.gsm8k import compute_score

FOLDER = os.environ.get("PENSTOCK_GSM8K", "")
OWN_ROWS = [
    "Six boxes hold 7 pears each: 6*7=<<6*7=42>>42.\n#### 42",
    "The lorry costs 12,500 + 1,000 = 13,500.\n#### 13,500",
    "It fell by 8 degrees from 3.\n#### -5",
    "Half of 5 is 2.5.\n#### 2.5",
]


def score(solution: str, truth: str, **settings) -> float:
    return compute_score("openai/gsm8k", solution, truth, {}, **settings)


def answers() -> list[str]:
    if not FOLDER:
        return OWN_ROWS
    files = [Path(FOLDER) / name for name in ("train.jsonl", "test.jsonl")]
    return [json.loads(line)["answer"] for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def perturbed(answer: str) -> str:
    """The same text with another final number."""
    text, number = answer.rsplit("####", 1)
    return f"{text}#### {float(number.replace(',', '')) + 1:g}"


@pytest.mark.parametrize("method", ["strict", "flexible"])
def test_every_reference_answer_is_right_and_no_other_number_is(method: str) -> None:
    """All 8,792 rows where PENSTOCK_GSM8K names the folder with train.jsonl and test.jsonl."""
    given = answers()
    assert len(given) in (len(OWN_ROWS), 8792)
    for answer in given:
        number = answer.rsplit("####", 1)[1].strip()
        assert score(answer, number, method=method) == 1.0, answer
        assert score(answer, answer, method=method) == 1.0, answer
        assert score(perturbed(answer), number, method=method) == 0.0, answer
        assert score(re.sub(r"####.*", "", answer), number) == 0.0, answer


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("#### 1000", 1.0, 1.0),
        ("so it is #### 1,000.", 1.0, 1.0),
        ("#### $1,000.00", 1.0, 1.0),
        ("#### 7 no, #### 1000", 1.0, 1.0),
        ("#### 1000 and not #### 7", 0.0, 0.0),
        ("The answer is 1000", 0.0, 1.0),
        ("The answer is 1000. That is all...", 0.0, 1.0),
        ("#### about 1000", 0.0, 1.0),
        ("#### -1000", 0.0, 0.0),
        ("#### 1000.4", 0.0, 0.0),
        ("#### ,.-", 0.0, 0.0),
        ("", 0.0, 0.0),
        ("#### 1000" + " so" * 200, 0.0, 0.0),
    ],
)
def test_forms(text: str, strict: float, flexible: float) -> None:
    assert score(text, "1000") == strict
    assert score(text, "1000", method="flexible") == flexible
    assert score(text, "Ten hundreds.\n#### 1,000", right=2.0, wrong=-1.0) == (2.0 if strict else -1.0)


def test_gsm8k_bad_row_or_method_raises() -> None:
    with pytest.raises(ValueError, match="'no number' is not a number"):
        score("#### 1", "no number")
    with pytest.raises(ValueError, match="strict or flexible"):
        score("#### 1", "1", method="strickt")
