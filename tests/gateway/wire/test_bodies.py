"""Bodies as they are declared for OpenAPI: what is answered fits, what is declared is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from penstock.gateway import wire
from penstock.gateway.wire import FIELDS

HEAD = wire.AnswerHead("id_1", 1_700_000_000, "tiny", 5)
CALL = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
TOOL = {"name": "add", "parameters": {"type": "object", "properties": {}}}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
ROUTES = [
    (wire.parse_chat, wire.chat_body, wire.ChatAnswer, {**CHAT, "tools": [{"type": "function", "function": TOOL}]}),
    (wire.parse_completion, wire.completion_body, wire.CompletionAnswer, {"model": "m", "prompt": "x"}),
    (
        wire.parse_response,
        wire.response_body,
        wire.ResponseAnswer,
        {"model": "m", "input": "x", "tools": [{"type": "function", **TOOL}]},
    ),
]
LOGPROBS = [{"logprobs": True}, {"logprobs": 0}, {"include": ["message.output_text.logprobs"]}]


@pytest.mark.parametrize("route", [0, 1, 2], ids=["chat", "completions", "responses"])
@pytest.mark.parametrize("text", ["", "yes", f"Hm. {CALL}", CALL])
@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("told", [False, True])
def test_answers_fit_what_is_declared(
    detokenizer: wire.Detokenizer, chat_for: Callable[..., Any], route: int, text: str, reason: Any, told: bool
) -> None:
    parse, build, answer, body = ROUTES[route]
    ask = parse({**body, **(LOGPROBS[route] if told else {})})
    ids = chat_for().encode(text)
    built = build(ask, HEAD, [wire.read_answer(ask, HEAD, 0, detokenizer, (ids, [-1.0] * len(ids), reason))])
    assert answer.model_validate(built).model_dump(exclude_unset=True) == built


def test_harmless_fields_are_declared() -> None:
    schema = wire.ChatBody.model_json_schema()
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid({**CHAT, "store": True, "user": "u", "tool_choice": "none"})
    assert not validator.is_valid({**CHAT, "logit_bias": {}})
    assert not validator.is_valid({**CHAT, "tool_choice": "required"})
    assert FIELDS.read({**CHAT, "store": True, "user": "u", "tool_choice": "none"})
