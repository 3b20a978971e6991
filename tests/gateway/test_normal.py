"""What is the same message, and what is not."""

from __future__ import annotations

import pytest

from penstock.gateway import first_key, next_key
from penstock.gateway.prefix_tree import normal

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"a": 1, "b": [2.5, "ü"]}}}
SAID = {"role": "assistant", "content": "", "tool_calls": [CALL]}


def call(**changes):
    return {"role": "assistant", "content": None, "tool_calls": [{**CALL, **changes}]}


@pytest.mark.parametrize(
    "same",
    [
        {
            **SAID,
            "content": None,
            "refusal": None,
            "audio": None,
            "name": None,
            "annotations": [],
            "function_call": None,
        },
        call(function={"name": "f", "arguments": '{"b":[2.5,"\\u00fc"],"a":1}'}),
        call(index=0),
        {**SAID, "content": [{"type": "text", "text": ""}]},
        {**SAID, "content": " \n"},
    ],
)
def test_a_call_however_it_is_spelled(same):
    assert normal(same) == normal(SAID)


@pytest.mark.parametrize(
    "other",
    [
        {**SAID, "content": "x"},
        {**SAID, "tool_calls": []},
        call(id="call_2"),
        call(function={"name": "g", "arguments": "{}"}),
        call(function={"name": "f", "arguments": '{"a": 2}'}),
        call(function={"name": "f", "arguments": "{broken"}),
    ],
)
def test_another_call(other):
    assert normal(other) != normal(SAID)


def test_what_a_user_says_is_kept_to_the_letter():
    one, two = {"role": "user", "content": "x"}, {"role": "user", "content": "x "}
    assert normal(one) != normal(two)
    assert normal({"role": "developer", "content": "x"}) == normal({"role": "system", "content": "x"})
    image = {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image", "url": "u"}]}
    assert normal(image) != normal(one)
    assert normal({"role": "tool", "tool_call_id": "a", "content": "1"}) != normal(
        {"role": "tool", "tool_call_id": "b", "content": "1"}
    )


def test_the_key_is_of_everything_said_and_of_the_tools():
    tools = [{"type": "function", "function": {"name": "f"}}]
    one = {"role": "user", "content": "x"}
    assert next_key(first_key([]), one) != next_key(first_key(tools), one)
    assert next_key(next_key("k", one), SAID) != next_key(next_key("k", SAID), one)
