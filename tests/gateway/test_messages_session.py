"""Requests of /v1/messages to one session: the same tree and journal as those of OpenAI's APIs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.agent_loops.families import THINKS_FIRST
from tests.gateway.conftest import CUSTOM_TOOLS, TOOLS, USER, MakeBench, asked, blocks_back, call_text, say, whole


async def test_arguments_that_javascript_rewrote_continue_the_turn(make_bench: MakeBench) -> None:
    """Claude Code sends 5.0 back as 5; the ids that were sampled stay."""
    sampled_call = '<tool_call>\n{"name": "calculator", "arguments": {"a": 5.0, "b": 9007199254740993}}\n</tool_call>'
    bench = await make_bench(sampled_call, "Done.")
    episode = await bench.open()
    fields = {"api": "messages", "tools": CUSTOM_TOOLS}
    call = await episode.answer(asked([USER], **fields))
    (choice,) = await call.whole()
    said = blocks_back(call.head, choice)
    assert said["content"][0]["input"]["a"] == 5
    said["content"][0]["input"]["b"] = 9007199254740992
    result = {"type": "tool_result", "tool_use_id": choice.calls[0].call_id, "content": "x"}
    await say(episode, [USER, said, {"role": "user", "content": [result]}], **fields)
    (segment,) = (await bench.trajectory(episode)).segments
    assert segment.num_turns == 2
    assert sampled_call in bench.parts.chat.decode(whole(segment))


CALL = call_text("1+2").replace('"expression"', '"options": [{"deep": 1}], "expression"')


@pytest.mark.parametrize(
    ("change", "segments"),
    [
        (lambda given: given, [2]),
        (lambda given: {**given, "replace_all": False}, [2]),
        (lambda given: {**given, "options": [{"deep": 1.0, "more": None}]}, [2]),
        (lambda given: {**given, "expression": "1+3"}, [1, 1]),
        (lambda given: {"expression": "1+2"}, [1, 1]),
        (lambda given: {**given, "options": [{"deep": 1}, {}]}, [1, 1]),
        (lambda given: {**given, "options": [{"deep": True}]}, [1, 1]),
        (lambda given: {**given, "options": []}, [1, 1]),
    ],
)
@pytest.mark.parametrize("api", ["chat", "messages"])
async def test_arguments_may_be_added_and_not_changed(
    make_bench: MakeBench, api: str, change: Callable[[Any], Any], segments: list[int]
) -> None:
    """Claude Code fills in its tools' defaults. What was sampled is what the model reads again."""
    bench = await make_bench(CALL, "Done.")
    episode = await bench.open()
    tools = CUSTOM_TOOLS if api == "messages" else TOOLS
    (choice,) = await (await episode.answer(asked([USER], api, tools=tools))).whole()
    (call,) = choice.calls
    given = change(dict(call.arguments))
    if api == "messages":
        said: Any = {"role": "assistant", "content": [tool_use(call.call_id, given)]}
        result: Any = {"type": "tool_result", "tool_use_id": call.call_id, "content": "3"}
        messages = [USER, said, {"role": "user", "content": [result]}]
    else:
        function = {"name": call.name, "arguments": json.dumps(given)}
        said = {"role": "assistant", "tool_calls": [{"id": call.call_id, "type": "function", "function": function}]}
        messages = [USER, said, {"role": "tool", "tool_call_id": call.call_id, "content": "3"}]
    await say(episode, messages, api=api, tools=tools)
    assert [segment.num_turns for segment in (await bench.trajectory(episode)).segments] == segments


def tool_use(call_id: str, given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "calculator", "input": given}


async def test_an_answer_by_messages_is_restored_from_the_journal(make_bench: MakeBench) -> None:
    bench = await make_bench("<think>\nhm\n</think>\n\n" + call_text("1+2"), "Done.")
    episode = await bench.open()
    fields = {"api": "messages", "tools": CUSTOM_TOOLS}
    first = await episode.answer(asked([USER], **fields))
    (choice,) = await first.whole()
    again = await bench.restart().find(episode.handle)
    repeated = await again.answer(asked([USER], **fields), retried=True)
    assert blocks_back(repeated.head, (await repeated.whole())[0]) == blocks_back(first.head, choice)
    assert repeated.head.answer_id == first.head.answer_id
    assert len(bench.client.requests) == 1


async def test_prompt_that_opens_the_thinking_makes_the_answer_begin_with_it(make_bench: MakeBench) -> None:
    bench = await make_bench("hm\n</think>\n\nyes", "so\n</think>no", template=THINKS_FIRST)
    episode = await bench.open()
    messages = [USER]
    for thinking, text in (("hm", "yes"), ("so", "no")):
        call = await episode.answer(asked(messages, api="messages"))
        (choice,) = await call.whole()
        said = blocks_back(call.head, choice)
        assert [block[block["type"]] for block in said["content"]] == [thinking, text]
        messages += [said, USER]
    (segment,) = (await bench.trajectory(episode)).segments
    assert segment.num_turns == 2


async def test_thinking_that_the_client_dropped_is_another_conversation(make_bench: MakeBench) -> None:
    bench = await make_bench("<think>\nhm\n</think>\n\nyes", "no")
    episode = await bench.open()
    call = await episode.answer(asked([USER], api="messages"))
    said = blocks_back(call.head, (await call.whole())[0])
    said["content"] = [block for block in said["content"] if block["type"] == "text"]
    await say(episode, [USER, said, USER], api="messages")
    assert [segment.num_turns for segment in (await bench.trajectory(episode)).segments] == [1, 1]


async def test_counting_leaves_no_trace(make_bench: MakeBench) -> None:
    bench = await make_bench("It is 46.", "Yes.")
    episode = await bench.open()
    before = await bench.journal(episode)
    tokens = await episode.count(asked([USER], api="messages"))
    assert (await bench.journal(episode), len(bench.client.requests)) == (before, 0)
    await say(episode, [USER], api="messages")
    assert tokens == len(bench.client.requests[0].token_ids)
