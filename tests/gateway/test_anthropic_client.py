"""The `anthropic` package, unmodified, against a real rollout server: it knows a base_url and an api_key."""

from __future__ import annotations

from functools import partial
from typing import Any

import anthropic
import httpx
import pytest
from tests.gateway.conftest import CUSTOM_TOOLS, TOOLS, USER, sampled, whole
from tests.gateway.recording_server import CALL, MODEL, RUN, Server, server, talking_model
from tests.gateway.talking_engine import tool_result

__all__ = ["server", "talking_model"]


def results_of(message: Any) -> dict[str, Any]:
    """One user message with all results, as Anthropic wants them."""
    blocks = [
        {"type": "tool_result", "tool_use_id": block.id, "content": tool_result(block.input["expression"])}
        for block in message.content
        if block.type == "tool_use"
    ]
    return {"role": "user", "content": blocks}


async def ask(client: Any, streamed: bool, messages: list[Any], **fields: Any) -> Any:
    asked = {"model": MODEL, "max_tokens": 400, "messages": messages, **fields}
    if not streamed:
        return await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        return await stream.get_final_message()


def check_exact(server: Server, segment: Any) -> None:
    """What is recorded is what the engine was fed and sampled, and each prompt extends the one before."""
    said, asked = server.engine.said, server.engine.asked
    assert sampled(segment) == [token for ids in said for token in ids]
    assert whole(segment) == [*asked[-1].token_ids, *said[-1]]
    for before, answer, after in zip(asked, said, asked[1:], strict=False):
        fed = [*before.token_ids, *answer]
        assert list(after.token_ids[: len(fed)]) == fed


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_agent_with_tools_is_recorded_token_for_token(server: Server, streamed: bool) -> None:
    episode = await server.open()
    client = server.anthropic(episode)
    fields = {"tools": CUSTOM_TOOLS, "system": [{"type": "text", "text": "Be brief."}]}
    messages: list[Any] = [CALL]
    first = await ask(client, streamed, messages, **fields)
    assert [block.type for block in first.content] == ["text", "tool_use", "tool_use"]
    assert (first.stop_reason, first.content[0].text) == ("tool_use", "Let me see.")
    messages += [{"role": "assistant", "content": first.content}, results_of(first)]
    second = await ask(client, streamed, messages, **fields)
    assert (second.stop_reason, second.content[0].text) == ("end_turn", "The answer is 3 and 34.")
    usage, fed = second.usage, len(server.engine.asked[1].token_ids)
    assert usage.input_tokens + usage.cache_read_input_tokens == fed
    assert usage.cache_read_input_tokens == len(server.engine.asked[0].token_ids) + first.usage.output_tokens
    messages += [{"role": "assistant", "content": second.content}, {"role": "user", "content": "Think of 7"}]
    third = await ask(client, streamed, messages, **fields)
    assert [(block.type, getattr(block, block.type)) for block in third.content] == [
        ("thinking", "Think of 7"),
        ("text", "Done. \n"),
    ]
    messages += [{"role": "assistant", "content": third.content}, USER]
    await ask(client, streamed, messages, **fields)
    trajectory = await server.finish(episode, 0.5)
    (segment,) = trajectory.segments
    assert (trajectory.reward, trajectory.num_turns, trajectory.metrics["tool_calls"]) == (0.5, 4, 2)
    assert trajectory.extra["agent"] == "anthropic client"
    check_exact(server, segment)


async def test_one_episode_by_two_apis_is_one_segment(server: Server) -> None:
    episode = await server.open()
    first = await ask(server.anthropic(episode), False, [CALL], tools=CUSTOM_TOOLS)
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.model_dump_json()}}
        for block in first.content[1:]
    ]
    for call, block in zip(calls, first.content[1:], strict=True):
        call["function"]["arguments"] = f'{{"expression": "{block.input["expression"]}"}}'
    said = {"role": "assistant", "content": "Let me see.", "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in calls]
    await server.client(episode).chat.completions.create(model=MODEL, messages=[CALL, said, *results], tools=TOOLS)
    (segment,) = (await server.finish(episode)).segments
    check_exact(server, segment)


async def test_stop_sequences_and_one_call_at_a_time(server: Server) -> None:
    episode = await server.open()
    client = server.anthropic(episode)
    stopped = await ask(client, False, [USER], stop_sequences=["12+"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "12+")
    assert stopped.content[0].text == "You said: What is "
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    one = await ask(client, True, [CALL], tools=CUSTOM_TOOLS, tool_choice=choice)
    assert [block.type for block in one.content] == ["text", "tool_use"]
    none = await ask(client, False, [CALL], tools=CUSTOM_TOOLS, tool_choice={"type": "none"})
    assert [block.type for block in none.content] == ["text"]
    assert none.content[0].text.count("<tool_call>") == 2
    cut = await ask(client, False, [USER], max_tokens=3)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)


async def test_the_runs_limit_holds_where_it_is_lower(server: Server) -> None:
    episode = await server.open()
    await ask(server.anthropic(episode), False, [USER], max_tokens=32_000)
    assert server.engine.asked[-1].sampling.max_new_tokens == 400


async def test_count_tokens_is_of_the_prompt_and_samples_nothing(server: Server) -> None:
    episode = await server.open()
    client = server.anthropic(episode)
    fields: Any = {"model": MODEL, "system": "Be brief.", "tools": CUSTOM_TOOLS}
    messages: list[Any] = [CALL]
    for _ in range(2):
        counted = await client.messages.count_tokens(messages=messages, **fields)
        answer = await ask(client, False, messages, **fields)
        assert counted.input_tokens == len(server.engine.asked[-1].token_ids)
        messages += [{"role": "assistant", "content": answer.content}, results_of(answer)]
    await client.messages.count_tokens(messages=[*messages[:-1], USER], **fields)
    assert [segment.num_turns for segment in (await server.finish(episode)).segments] == [2]


async def test_models_in_anthropics_format(server: Server) -> None:
    client = server.anthropic(await server.open())
    assert [model.id async for model in client.models.list()] == [MODEL, "gpt-4o"]
    assert (await client.models.retrieve("gpt-4o")).type == "model"
    with pytest.raises(anthropic.NotFoundError):
        await client.models.retrieve("claude")


async def test_errors_are_the_packages_own(server: Server) -> None:
    episode = await server.open()
    client = server.anthropic(episode)
    image = {"type": "image", "source": {"type": "url", "url": "x"}}
    for fields, kind, status, words in (
        ({"model": "claude"}, "not_found_error", 404, "served: tiny-qwen, gpt-4o"),
        ({"tools": CUSTOM_TOOLS, "tool_choice": {"type": "any"}}, "invalid_request_error", 400, "tool_choice: "),
        ({"messages": [{"role": "user", "content": [image]}]}, "invalid_request_error", 400, "messages.0.content.0: "),
        ({"extra_body": {"top_p": 0.9}}, "invalid_request_error", 400, "top_p: "),
        ({"messages": [{"role": "user", "content": "a " * 3000}]}, "invalid_request_error", 400, "prompt is too long"),
    ):
        for streamed in (False, True):
            with pytest.raises(anthropic.APIStatusError) as refused:
                await ask(client, streamed, **{"messages": [USER], **fields})
            error: Any = refused.value.body
            assert (refused.value.status_code, error["type"], error["error"]["type"]) == (status, "error", kind)
            assert words in error["error"]["message"]
    await ask(client, False, [USER])
    await server.finish(episode)
    with pytest.raises(anthropic.APIStatusError, match="is finished") as gone:
        await ask(client, False, [USER])
    assert gone.value.status_code == 410


async def test_errors_around_the_routes_have_anthropics_shape(server: Server) -> None:
    episode = await server.open()
    path = f"/episodes/{episode['handle']}/v1"
    key, version = {"x-api-key": episode["api_key"]}, {"anthropic-version": "2023-06-01"}
    post = partial(server.post, f"{path}/messages")
    responses = [
        (await post({}, {}), 401, "authentication_error"),
        (await post({}, {"x-api-key": "nonsense"}), 401, "authentication_error"),
        (await post({}, key), 400, "invalid_request_error"),
        (await post({"messages": "a" * (17 << 20)}, key), 413, "request_too_large"),
        (await server.post(f"{path}/messages/batches", {}, key), 404, "not_found_error"),
        (await server.post(f"{path}/files", {}, {**key, **version}), 404, "not_found_error"),
        (
            await server.post(f"/episodes/{episode['handle']}/finish", {}, {**key, **version}),
            401,
            "authentication_error",
        ),
    ]
    for response, status, kind in responses:
        body = response.json()
        assert (response.status_code, body["type"], body["error"]["type"]) == (status, "error", kind), response.text
        assert set(body["error"]) == {"type", "message"}


async def test_key_in_either_header_opens_its_own_episode_only(server: Server) -> None:
    one, two = await server.open(), await server.open()
    token = server.anthropic(one, api_key=None, auth_token=one["api_key"])
    answer = await ask(token, False, [USER])
    assert (answer.type, str(answer._request_id)[:4]) == ("message", "req_")
    for stranger in (
        server.anthropic({**two, "api_key": one["api_key"]}),
        server.anthropic(two, api_key=None, auth_token=one["api_key"]),
    ):
        with pytest.raises(anthropic.AuthenticationError):
            await ask(stranger, False, [USER])
        with pytest.raises(anthropic.AuthenticationError):
            await stranger.messages.count_tokens(model=MODEL, messages=[USER])
    key = {"x-api-key": one["api_key"]}
    for path in ("/episodes", "/generate", "/drain", f"/episodes/{two['handle']}/finish", "/weights"):
        assert (await server.post(path, {}, key)).status_code == 401, path
    for path in ("", "/reward", "/finish"):
        assert (await server.post(f"/episodes/{one['handle']}{path}", {}, key)).status_code in (401, 405)
    bytes_in_key = {"x-api-key": "é".encode("latin-1")}
    assert (await server.post(f"/episodes/{one['handle']}/v1/messages", {}, bytes_in_key)).status_code == 401
    async with httpx.AsyncClient(headers=RUN, timeout=60) as http:
        state = (await http.get(f"{server.url}/episodes/{two['handle']}")).json()
    assert state["turns"] == 0
