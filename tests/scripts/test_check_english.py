"""`scripts/check-english` names what is wrong with its line, and is quiet on what is right."""

import runpy
from pathlib import Path
from typing import Any

import pytest

CHECK = Path(__file__).parents[2] / "scripts/check-english"


@pytest.fixture(scope="module")
def check() -> dict[str, Any]:
    return runpy.run_path(str(CHECK))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('"""Of the weights."""', ["Of"]),
        ('def size():\n    """What it takes."""', ["What"]),
        ('class Job:\n    size: int\n    """Of the job."""', ["Of"]),
        ('LIMIT = 3\n"""How many."""\nrun()\n"""Of no field."""', ["How"]),
        ("found = 1", ["found"]),
        ("# whoever asks gets it", ["whoever asks"]),
        ('x = "the run goes on without its server"', ["goes on"]),
        ('"""Return the size.\n\n    Who sends it is not asked."""', []),
        ("class Check:\n    found: str", []),
        ("match = goes_on = 1", []),
    ],
)
def test_code_is_named_for_openings_participles_and_phrases(
    check: dict[str, Any], tmp_path: Path, text: str, words: list[str]
) -> None:
    file = tmp_path / "module.py"
    file.write_text(text + "\n")
    problems = [problem for _, problem in check["problems_of_code"](file)]
    assert len(problems) == len(words)
    assert all(word in problem for word, problem in zip(words, problems, strict=True))


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("word " * 21, [1]),
        ("word\n\n```\n" + "word " * 40 + "\n```\n" + "word " * 21, [6]),
        ("    " + "word " * 40, []),
        ("| a | " + "word " * 25 + "|", [1]),
        ("| " + "word " * 20 + "| " + "word " * 20 + "|", []),
        ("- `" + "word " * 25 + "`", []),
        ("Files next to the model; the client continues.", []),
        ("Files beside the model.\n\nThe client goes on.", [1, 3]),
    ],
)
def test_page_is_named_for_width_and_phrases(
    check: dict[str, Any], tmp_path: Path, text: str, lines: list[int]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    assert [line for line, _ in check["problems_of_page"](page)] == lines
