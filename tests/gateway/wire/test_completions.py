"""/v1/completions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.gateway.wire.completions import CompletionStream, completion_body, parse_completion
from penstock.gateway.wire.types import AnswerHead, Choice


@pytest.mark.parametrize(
    ("given", "prompt"),
    [("Once", "Once"), (["Once"], "Once"), ([1, 2, 3], (1, 2, 3)), ([[1, 2, 3]], (1, 2, 3))],
)
def test_one_prompt_as_text_or_exact_ids(given: Any, prompt: Any) -> None:
    ask = parse_completion({"model": "tiny", "prompt": given, "max_tokens": 5, "echo": False, "best_of": 2, "n": 2})
    assert (ask.prompt, ask.n, ask.sampling) == (prompt, 2, {"max_new_tokens": 5})
    assert not ask.reads_calls


@pytest.mark.parametrize("prompt", ["Once", [1, 2, 3]])
def test_completions_echo_is_answered(prompt: Any) -> None:
    asked = parse_completion({"model": "tiny", "prompt": prompt, "echo": True, "n": 2})
    assert asked.echo_prompt
    head = AnswerHead("cmpl-1", 0, "tiny", 3, echoed="Once")
    choices = [Choice(index, (5,), (-0.5,), " upon", " upon") for index in range(2)]
    whole = completion_body(asked, head, choices)
    assert [one["text"] for one in whole["choices"]] == ["Once upon"] * 2
    assert whole["usage"]["completion_tokens"] == 2, "the prompt is not sampled"
    stream = CompletionStream(asked, head)
    sent = b"".join([stream.start(), *(stream.finish(one) for one in choices)]).decode()
    events = [json.loads(line.removeprefix("data: ")) for line in sent.splitlines() if line]
    for index in range(2):
        texts = [event["choices"][0]["text"] for event in events if event["choices"][0]["index"] == index]
        assert "".join(texts) == "Once upon"


@pytest.mark.parametrize(("given", "asked"), [(None, False), (0, True), (1, True)])
def test_logprobs_are_asked_for_by_number(given: Any, asked: bool) -> None:
    assert parse_completion({"model": "tiny", "prompt": "x", "logprobs": given}).logprobs is asked
