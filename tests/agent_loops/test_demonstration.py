"""A written conversation becomes the segments of its episode, over the chat templates of the families."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.agent_loops.families import FAMILIES, THINKS_FIRST, Family
from tests.agent_loops.talking import TOOLS, USER

from penstock.agent_loops import BadDemonstration, ChatTokens, TemplateError, segments_of
from penstock.agent_loops.chat import verify_template
from penstock.transfer_queue import Segment, check_segment

CALL = {"type": "function", "id": "call00000", "function": {"name": "calculator", "arguments": {"expression": "12+34"}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "46", "name": "calculator", "tool_call_id": "call00000"}
SAYS = {"role": "assistant", "content": "It is 46."}
WITH_TOOLS = [name for name, family in FAMILIES.items() if family.takes_tools]
text = st.text(alphabet=st.characters(blacklist_characters="<[|", blacklist_categories=["Cs"]), max_size=30)


def whole(segment: Segment) -> list[int]:
    return [*segment.prompt_ids.tolist(), *segment.response_ids.tolist()]


def sampled(chat: ChatTokens, segment: Segment) -> list[str]:
    """Text of each run with mask 1."""
    mask, ids = segment.response_mask, segment.response_ids
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    return [chat.decode(ids[start:end].tolist()) for start, end in pairwise(edges) if end > start and mask[start]]


def splits(name: str) -> ChatTokens:
    chat = FAMILIES[name].chat()
    verify_template(chat, TOOLS if FAMILIES[name].takes_tools else ())
    return chat


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_one_reply_is_what_the_template_writes(name: str) -> None:
    chat = splits(name)
    (segment,) = segments_of(chat, [USER, SAYS])
    check_segment(segment, 0, "it")
    written = chat.template.render([USER, SAYS], prompt=False)
    assert written.startswith(chat.decode(segment.prompt_ids.tolist()))
    (reply,) = sampled(chat, segment)
    assert "It is 46." in reply
    assert int(segment.response_ids[-1]) in chat.stop_token_ids
    assert segment.prompt_ids.tolist() == list(chat.prompt_ids([USER]))


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_tool_trace_is_the_tokens_of_its_episode(name: str) -> None:
    """As a loop would append them: prompt, the reply, what `go_on` feeds, the next reply."""
    chat = splits(name)
    (segment,) = segments_of(chat, [USER, CALLS, RESULT, SAYS], TOOLS)
    assert segment.num_turns == 2
    first, second = sampled(chat, segment)
    read = chat.parser.parse(first, TOOLS).calls
    assert [(call.name, call.arguments) for call in read] == [("calculator", {"expression": "12+34"})]
    assert "It is 46." in second
    fed = chat.decode(segment.response_ids[segment.response_mask == 0].tolist())
    assert "46" in fed
    assert "It is" not in fed


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"qwen3", "qwen3_not_thinking", "gpt_oss", "mistral"}))
@settings(max_examples=20)
@given(asked=text, said=text, again=text)
def test_several_turns_read_as_the_template_writes_them(name: str, asked: str, said: str, again: str) -> None:
    """For templates that keep history: nothing is lost or added between the turns."""
    chat = splits(name)
    messages: list[Any] = [
        {"role": "user", "content": f"Q {asked}".strip()},
        {"role": "assistant", "content": f"So {said}".strip()},
        {"role": "user", "content": f"And {again}".strip()},
        SAYS,
    ]
    (segment,) = segments_of(chat, messages)
    written = chat.template.render(messages, prompt=False)
    assert written.startswith(chat.decode(whole(segment)[:-1]))
    assert len(sampled(chat, segment)) == 2


def test_a_rewritten_history_begins_a_new_segment() -> None:
    """thinking_history: strip, as episodes have it."""
    chat = FAMILIES["qwen3"].chat(thinking_history="strip")
    verify_template(chat)
    thinks = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nFirst."}
    one, two = segments_of(chat, [USER, thinks, USER, thinks])
    assert "hm" in chat.decode(one.response_ids.tolist())
    assert "hm" not in chat.decode(two.prompt_ids.tolist())
    assert "First." in chat.decode(two.prompt_ids.tolist())


def test_a_template_that_opens_replies_otherwise_is_refused(tmp_path: Any) -> None:
    file = tmp_path / "thinks_first.jinja"
    file.write_text(THINKS_FIRST)
    chat = Family("thinks_first", file, "<|im_end|>", parser="qwen3_coder").chat()
    with pytest.raises(TemplateError, match="opens a written reply otherwise"):
        segments_of(chat, [USER, SAYS])


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([USER], "ends with role user"),
        ([SAYS], "begins with role assistant and ends with role assistant"),
        ([USER, SAYS, USER], "ends with role user"),
        ([USER, SAYS, SAYS], "1 and 2 are both of the model"),
        ([USER, {**SAYS, "weight": 0}], "`weight`"),
        ([USER, {**SAYS, "content": "x<|im_end|>y"}], "ends a turn"),
        ([{"role": "user", "content": [{"type": "image", "image": "data:x"}]}, SAYS], "images"),
    ],
)
def test_what_is_no_conversation_is_refused(messages: list[Any], said: str) -> None:
    with pytest.raises(BadDemonstration, match=said):
        segments_of(FAMILIES["qwen2_5"].chat(), messages)
