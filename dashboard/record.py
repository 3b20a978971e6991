"""One recorded trajectory as the page draws it: each run cut into its tokens, each answer's tool calls read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from penstock.dashboard.plain import plain
from penstock.dashboard.rows import as_text
from penstock.tools.parsers import ToolCallParser, get_parser

ABSENT: Mapping[str, Any] = {
    "outcome": {"kind": "", "reason": "", "component": ""},
    "extra": {},
    "metrics": {},
    "num_turns": 0,
}
"""For files of an older recorder."""


def page_record(record: Mapping[str, Any], parser_name: str) -> dict[str, Any]:
    """The record with ``pieces`` (the text of each token, where it was recorded) and ``calls`` in each run."""
    parser = _parser(parser_name)
    segments = [
        {**segment, "prompt": as_text(segment["prompt"]), "runs": [_run(run, parser) for run in segment["runs"]]}
        for segment in record["segments"]
    ]
    made: dict[str, Any] = plain({**ABSENT, **record, "segments": segments})
    return made


def _run(run: Mapping[str, Any], parser: ToolCallParser | None) -> dict[str, Any]:
    text = as_text(run["text"])
    calls = parser.parse(text).calls if parser is not None and run["mask"] else ()
    return {**run, "text": text, "pieces": _pieces(run, text), "calls": list(calls)}


def _pieces(run: Mapping[str, Any], text: str) -> Sequence[str]:
    """Empty where it is not known which token made which characters."""
    if not isinstance(run["text"], str):
        return [f"{number} " for number in run["text"]]
    ends = run.get("ends", ())
    return [text[start:end] for start, end in pairwise([0, *ends])]


def _parser(name: str) -> ToolCallParser | None:
    try:
        return get_parser(name)
    except ValueError:
        return None
