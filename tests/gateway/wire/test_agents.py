"""A public agent framework, unmodified: what `openai-agents` sends is taken, what it gets it can work with."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool

from penstock.gateway.wire.chat import message_of

CALL = '<tool_call>\n{{"name": "add", "arguments": {{"a": {}, "b": 2}}}}\n</tool_call>'
ANSWERS = [
    f"Let me see.\n{CALL.format(1)}\n{CALL.format(5)}<|im_end|>",
    f"{CALL.format(9)}<|im_end|>",
    "3, 7 and 11.<|im_end|>",
]


@function_tool
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


@pytest.fixture(autouse=True)
def no_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")


async def run(agent: Agent[Any], streamed: bool) -> Any:
    if not streamed:
        return await Runner.run(agent, "What is 1+2, 5+2 and 9+2?")
    result = Runner.run_streamed(agent, "What is 1+2, 5+2 and 9+2?")
    deltas = [event.data.delta async for event in result.stream_events() if shows_text(event)]
    assert "".join(deltas) == "Let me see.3, 7 and 11."
    return result


def shows_text(event: Any) -> bool:
    return event.type == "raw_response_event" and event.data.type == "response.output_text.delta"


@pytest.mark.parametrize("api", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("parallel", [None, True])
async def test_an_episode_with_tools(
    scripted: Callable[..., Any], api: Any, streamed: bool, parallel: bool | None
) -> None:
    server = scripted(*ANSWERS, repeat=1)
    settings = ModelSettings(temperature=1.0, max_tokens=500, parallel_tool_calls=parallel, include_usage=True)
    agent = Agent(
        name="adder", instructions="Be brief.", tools=[add], model=api("tiny", server.client()), model_settings=settings
    )
    result = await run(agent, streamed)
    assert result.final_output == "3, 7 and 11."
    answered = [message_of(choice) for (choice,) in server.choices]
    history = list(server.asks[-1].messages)
    if server.asks[-1].instructions is not None:
        history.insert(0, {"role": "system", "content": server.asks[-1].instructions})
    for before, after in itertools.pairwise(server.asks):
        assert after.messages[: len(before.messages)] == before.messages, "no request rewrites an earlier one"
        assert (after.tools, after.instructions) == (before.tools, before.instructions)
    roles = [message["role"] for message in history]
    assert roles == ["system", "user", "assistant", "tool", "tool", "assistant", "tool"]
    assert [history[2], history[5]] == answered[:2], "earlier answers come back as they were given"
    assert [message["content"] for message in history if message["role"] == "tool"] == ["3", "7", "11"]
    sent = [one["id"] for message in answered[:2] for one in message["tool_calls"]]
    assert [message["tool_call_id"] for message in history if message["role"] == "tool"] == sent


@pytest.mark.parametrize("api", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
async def test_one_agent_hands_over_to_another(scripted: Callable[..., Any], api: Any) -> None:
    hand_over = '<tool_call>\n{"name": "transfer_to_adder", "arguments": {}}\n</tool_call>'
    server = scripted(f"{hand_over}<|im_end|>", f"{CALL.format(1)}<|im_end|>", "3.<|im_end|>", repeat=1)
    model = api("tiny", server.client())
    adder = Agent(name="adder", instructions="Add.", tools=[add], model=model)
    result = await Runner.run(Agent(name="boss", instructions="Hand over.", handoffs=[adder], model=model), "1+2?")
    assert result.final_output == "3."
    assert result.last_agent.name == "adder"
