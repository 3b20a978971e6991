"""The `openai` package, unmodified, against a real rollout server: it knows a base_url and an api_key."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import openai
import pytest
from tests.gateway.conftest import TOOLS, USER, sampled, whole
from tests.gateway.recording_server import CALL, MODEL, RUN, Server, server, talking_model
from tests.gateway.talking_engine import tool_result

__all__ = ["server", "talking_model"]


def results_of(message: Any) -> list[dict[str, Any]]:
    return [
        {
            "role": "tool",
            "tool_call_id": call.id,
            "content": tool_result(json.loads(call.function.arguments)["expression"]),
        }
        for call in message.tool_calls or []
    ]


async def test_an_agent_with_tools_is_recorded_token_for_token(server: Server) -> None:
    episode = await server.open()
    client, model = server.client(episode), episode["model"]
    messages: list[Any] = [CALL]
    first = (await client.chat.completions.create(model=model, messages=messages, tools=TOOLS)).choices[0]
    assert first.finish_reason == "tool_calls"
    assert first.message.content == "Let me see."
    assert len({call.id for call in first.message.tool_calls}) == 2
    messages += [first.message, *results_of(first.message)]
    second = (await client.chat.completions.create(model=model, messages=messages, tools=TOOLS)).choices[0]
    assert second.message.content == "The answer is 3 and 34."
    messages += [second.message.model_dump(), USER]
    third = await client.chat.completions.create(model=model, messages=messages, tools=TOOLS)
    assert third.choices[0].message.content.startswith("You said: What is 12+34?")
    trajectory = await server.finish(episode, 0.5)
    (segment,) = trajectory.segments
    assert (trajectory.reward, trajectory.num_turns, trajectory.metrics["tool_calls"]) == (0.5, 3, 2)
    assert sampled(segment) == [token for ids in server.engine.said for token in ids]
    assert whole(segment) == [*server.engine.asked[-1].token_ids, *server.engine.said[-1]]


async def test_streams_are_the_same_answers_and_end_after_the_journal(server: Server) -> None:
    episode = await server.open()
    client, model = server.client(episode), episode["model"]
    stream = await client.chat.completions.create(
        model=model, messages=[CALL], tools=TOOLS, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    calls = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or []]
    assert [json.loads(call.function.arguments) for call in calls] == [{"expression": "1+2"}, {"expression": "30+4"}]
    assert chunks[-1].usage.completion_tokens == len(server.engine.said[0])
    said = {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [call.model_dump(exclude={"index"}) for call in calls],
    }
    results = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in calls]
    messages = [CALL, said, *results]
    server.engine.token_s = 0.03
    async with client.chat.completions.stream(model=model, messages=messages, tools=TOOLS) as events:
        pieces = [event.delta async for event in events if event.type == "content.delta"]
    assert "".join(pieces) == "The answer is 3 and 3."
    assert len(pieces) > 3
    assert [segment.num_turns for segment in (await server.finish(episode)).segments] == [2]


async def test_n_stop_logprobs_and_what_the_run_refuses(server: Server) -> None:
    episode = await server.open()
    create = partial(server.client(episode).chat.completions.create, model=episode["model"], messages=[USER])
    three = await create(n=3, seed=1)
    assert [choice.message.content[-3:] for choice in three.choices] == ["(1)", "(2)", "(3)"]
    stopped = await create(stop="12+")
    assert stopped.choices[0].message.content == "You said: What is "
    assert "12+" in server.engine.chat.decode(server.engine.said[3])
    spelled = await create(logprobs=True, seed=9)
    tokens = spelled.choices[0].logprobs.content
    assert b"".join(bytes(one.bytes) for one in tokens).decode() == spelled.choices[0].message.content + "<|im_end|>"
    assert {one.logprob for one in tokens} == {-0.25}
    with pytest.raises(openai.BadRequestError, match="truncates the policy") as truncated:
        await create(top_p=0.9)
    assert (truncated.value.param, "refused (" in truncated.value.message) == ("top_p", False)
    with pytest.raises(openai.BadRequestError) as too_long:
        await create(messages=[{"role": "user", "content": "long " * 3000}])
    assert too_long.value.code == "context_length_exceeded"
    assert len((await server.finish(episode)).segments) == 5


async def test_responses_and_completions(server: Server) -> None:
    episode = await server.open()
    client, model = server.client(episode), episode["model"]
    one = await client.responses.create(model=model, input="Hello", instructions="Be brief.")
    assert one.output_text == "You said: Hello 数🙂"
    two = await client.responses.create(
        model=model, input="Bye", instructions="Be brief.", previous_response_id=one.id, stream=True
    )
    events = [event async for event in two]
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == "You said: Bye 数🙂"
    whole_text = await client.completions.create(
        model=model, prompt="<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert whole_text.choices[0].text == "You said: Hi 数🙂"
    prompt = server.engine.chat.encode("<|im_start|>user\nHo<|im_end|>\n<|im_start|>assistant\n")
    by_ids = await client.completions.create(model=model, prompt=prompt)
    assert by_ids.choices[0].text == "You said: Ho 数🙂"
    with pytest.raises(openai.BadRequestError, match="echo"):
        await client.completions.create(model=model, prompt="x", echo=True)
    assert [entry.id async for entry in client.models.list()] == [MODEL, "gpt-4o"]
    assert [segment.num_turns for segment in (await server.finish(episode)).segments] == [2, 1, 1]


async def test_unknown_models_are_refused_and_aliases_are_not(server: Server) -> None:
    episode = await server.open()
    assert episode["model"] == MODEL, "no path of the server"
    client = server.client(episode)
    ways: list[Callable[[str], Any]] = [
        lambda name: client.chat.completions.create(model=name, messages=[USER]),
        lambda name: client.chat.completions.create(model=name, messages=[USER], stream=True),
        lambda name: client.completions.create(model=name, prompt="x"),
        lambda name: client.responses.create(model=name, input="x"),
        client.models.retrieve,
    ]
    for ask in ways:
        for name in ("gpt-4.1", "Tiny-Qwen", "/models/tiny-qwen"):
            with pytest.raises(openai.NotFoundError) as refused:
                await ask(name)
            error = refused.value
            assert (error.code, error.param, error.type) == ("model_not_found", "model", "invalid_request_error")
            assert name in error.message
            assert "tiny-qwen, gpt-4o" in error.message
        for name in (MODEL, "gpt-4o"):
            answered = await ask(name)
            assert getattr(answered, "model", name) == name
    assert (await client.models.retrieve("gpt-4o")).id == "gpt-4o"


def ask_by(vendor: str, server: Server, episode: dict[str, Any], **client: Any) -> Callable[..., Any]:
    if vendor == "openai":
        create: Any = server.client(episode, **client).chat.completions.create
        return partial(create, model=MODEL, messages=[USER])
    return partial(server.anthropic(episode, **client).messages.create, model=MODEL, messages=[USER], max_tokens=400)


def text_of(answer: Any) -> str:
    return str(answer.choices[0].message.content if hasattr(answer, "choices") else answer.content[0].text)


vendors = pytest.mark.parametrize("vendor", ["openai", "anthropic"])


@vendors
async def test_a_client_that_runs_out_of_patience_retries_into_the_same_answer(server: Server, vendor: str) -> None:
    episode = await server.open()
    await server.client(episode).models.list()
    server.engine.token_s = 0.2  # the answer takes more than the client's patience, of which each retry needs a part
    answer = await ask_by(vendor, server, episode, max_retries=10, timeout=1.0)()
    assert text_of(answer).startswith("You said: What is 12+34?")
    assert len(server.engine.asked) == 1


async def test_keys_open_their_own_episode_only(server: Server) -> None:
    one, two = await server.open(), await server.open()
    stranger = server.client({**two, "api_key": one["api_key"]})
    with pytest.raises(openai.AuthenticationError) as refused:
        await stranger.chat.completions.create(model=MODEL, messages=[USER])
    assert str(refused.value.request_id).startswith("req_")
    key = {"Authorization": f"Bearer {one['api_key']}"}
    for path in ("/episodes", "/generate", "/drain", f"/episodes/{two['handle']}/finish", "/episodes/", "/weights"):
        assert (await server.post(path, {}, key)).status_code == 401, path
    for path in ("", "/reward", "/finish", "/v1/chat/completions", "/v1/completions", "/v1/responses"):
        for headers in ({}, {"Authorization": "Bearer é".encode("latin-1")}):
            assert (await server.post(f"/episodes/{one['handle']}{path}", {}, headers)).status_code == 401
    for path, body in (("reward", {"reward": 1.0}), ("finish", {})):
        assert (await server.post(f"/episodes/{one['handle']}/{path}", body, key)).status_code == 401, path
    async with httpx.AsyncClient(headers=key, timeout=60) as agent:
        assert (await agent.get(f"{server.url}/episodes/{one['handle']}")).status_code == 401
        assert (await agent.get(f"{server.url}/episodes/{one['handle']}/v1/models")).status_code == 200
    async with httpx.AsyncClient(headers=RUN, timeout=60) as http:
        state = (await http.get(f"{server.url}/episodes/{one['handle']}")).json()
    assert (state["turns"], state["tokens_left"]) == (0, 20_000)


async def test_what_an_episode_is_told_and_what_it_is_not(server: Server) -> None:
    episode = await server.open()
    assert episode["task"]["messages"] == [USER]
    assert episode["task"]["extra_info"] == {"level": 3}
    assert "46" not in json.dumps(episode["task"])  # the ground truth
    assert (episode["deadline_s"], episode["idle_s"], episode["member"]) == (120.0, 300.0, 0)


UNASKED = {"role": "tool", "tool_call_id": "call_1", "content": "46"}


async def test_refusals_have_a_status_and_a_cause(server: Server) -> None:
    episode = await server.open()
    path = f"/episodes/{episode['handle']}"
    cases = [
        (f"{path}/finish", {}, 409, "nothing was sampled"),
        (f"{path}/finish", {"outcome": "great"}, 400, "outcome"),
        (f"{path}/reward", {"reward": "high"}, 400, "reward"),
        (f"{path}/reward", {"reward": float("1e999")}, 400, "reward"),
        (f"{path}/v1/chat/completions", {"model": MODEL}, 400, "messages"),
        (f"{path}/v1/chat/completions", [], 400, "JSON object"),
        (f"{path}/v1/chat/completions", {"model": MODEL, "messages": [USER, UNASKED]}, 400, "is not a call"),
        ("/episodes", {"wait_s": -1}, 400, "wait_s"),
        ("/episodes/nonsense/finish", {}, 404, "not a handle"),
    ]
    for where, body, status, words in cases:
        content, headers = json.dumps(body), {**RUN, "Content-Type": "application/json"}
        async with httpx.AsyncClient(headers=headers, timeout=60) as http:
            response = await http.post(server.url + where, content=content)
        assert (response.status_code, words in response.json()["error"]["message"]) == (status, True), response.text
    await server.client(episode).chat.completions.create(model=MODEL, messages=[USER])
    await server.finish(episode)
    with pytest.raises(openai.APIStatusError) as gone:
        await server.client(episode).chat.completions.create(model=MODEL, messages=[USER])
    assert (gone.value.status_code, "is finished" in str(gone.value)) == (410, True)


async def test_body_over_the_limit_is_413(server: Server) -> None:
    episode = await server.open()
    body = {"model": episode["model"], "messages": [{"role": "user", "content": "a" * (17 << 20)}]}
    response = await server.post(f"/episodes/{episode['handle']}/v1/chat/completions", body)
    assert response.status_code == 413, response.text[:300]
    assert response.json()["error"]["code"] == "too_large"
    assert (await server.post("/generate", {"token_ids": [1]})).status_code == 200


ERROR_KEYS = {"message", "type", "param", "code"}


async def test_every_error_has_openais_shape(server: Server) -> None:
    episode = await server.open()
    path, key = f"/episodes/{episode['handle']}", {"Authorization": f"Bearer {episode['api_key']}"}
    cases = [
        ("/episodes", {}, 401, "invalid_api_key"),
        (f"{path}/v1/chat/completions", {}, 401, "invalid_api_key"),
        (f"{path}/finish", key, 401, "invalid_api_key"),
        (f"{path}/v1/embeddings", key, 404, None),
        (f"{path}/v1/models", key, 405, None),
        (f"{path}/v1/chat/completions", key, 400, "invalid_value"),
    ]
    for where, headers, status, code in cases:
        response = await server.post(where, {}, headers)
        error = response.json()["error"]
        assert (response.status_code, set(error), error["code"]) == (status, ERROR_KEYS, code), response.text
        assert error["message"], where
    other = (await server.post("/generate", {}, {})).json()["error"]
    assert set(other) == {"field", "message"}


async def test_no_episode_left_is_503_with_the_cause(server: Server) -> None:
    for _ in range(8):
        await server.open()
    response = await server.post("/episodes", {"wait_s": 0.1})
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert "no episode is queued; 8 are being run" in response.text


@vendors
async def test_a_client_that_went_away_in_mid_stream_leaves_a_record(server: Server, vendor: str) -> None:
    episode = await server.open()
    ask = ask_by(vendor, server, episode)
    await server.clients[-1].models.list()
    server.engine.token_s = 0.5  # the answer is not whole when the client goes, however slow the machine is
    stream = await ask(stream=True)
    async for _ in stream:
        break
    await stream.close()
    server.engine.token_s = 0.01
    assert text_of(await ask()).startswith("You said")
    assert len(server.engine.asked) == 1
