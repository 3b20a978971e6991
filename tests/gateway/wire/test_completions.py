"""/v1/completions."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.gateway.wire import InvalidRequest, parse_completion


@pytest.mark.parametrize(
    ("given", "prompt"),
    [("Once", "Once"), (["Once"], "Once"), ([1, 2, 3], (1, 2, 3)), ([[1, 2, 3]], (1, 2, 3))],
)
def test_one_prompt_as_text_or_exact_ids(given: Any, prompt: Any) -> None:
    ask = parse_completion({"model": "tiny", "prompt": given, "max_tokens": 5, "echo": False, "best_of": 2, "n": 2})
    assert (ask.prompt, ask.n, ask.sampling) == (prompt, 2, {"max_new_tokens": 5})
    assert not ask.reads_calls


@pytest.mark.parametrize(("given", "asked"), [(None, False), (0, True), (1, True)])
def test_logprobs_are_asked_for_by_number(given: Any, asked: bool) -> None:
    assert parse_completion({"model": "tiny", "prompt": "x", "logprobs": given}).logprobs is asked


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 2}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt.1"),
        ({"prompt": None}, "prompt"),
        ({"tools": []}, "tools"),
    ],
    ids=str,
)
def test_what_is_refused_is_named(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse_completion({"model": "tiny", "prompt": "x", **fields})
    assert error.value.field == name
