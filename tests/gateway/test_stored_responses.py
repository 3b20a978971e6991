"""`client.responses.retrieve`, `delete`, `cancel`, `input_items` and `input_tokens` of the real `openai` package."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types.responses import Response
from openai.types.responses.response_item import ResponseItem
from pydantic import TypeAdapter
from tests.gateway.conftest import Bench, asked
from tests.gateway.recording_server import Server, server, talking_model

from penstock.gateway.stored_responses import answer_stored

__all__ = ["server", "talking_model"]
ADD: Any = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": True}
LOGPROBS: Any = ["message.output_text.logprobs"]


async def conversation(client: openai.AsyncOpenAI, model: str) -> tuple[Response, Response]:
    items: Any = [
        {"role": "user", "content": "Hello"},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"role": "user", "content": "Go on"},
    ]
    fields: Any = {"instructions": "Be brief.", "metadata": {"k": "v"}, "tools": [ADD], "model": model}
    one = await client.responses.create(input=items, **fields)
    two = await client.responses.create(input="Bye", previous_response_id=one.id, include=LOGPROBS, **fields)
    return one, two


async def test_a_response_is_retrieved_as_it_was_answered(server: Server) -> None:
    episode = await server.open()
    client = server.client(episode)
    for made in await conversation(client, "gpt-4o"):
        with_logprobs = await client.responses.retrieve(made.id, include=LOGPROBS)
        assert with_logprobs.output[0].content[0].logprobs, "they are in the journal"
        plain = (await client.responses.retrieve(made.id)).to_dict()
        expected = made.to_dict()
        expected["output"][0]["content"][0]["logprobs"] = []  # sent only where they are asked for
        assert plain == expected


async def test_input_items_are_the_conversation_in_pages(server: Server) -> None:
    episode = await server.open()
    client = server.client(episode)
    one, two = await conversation(client, episode["model"])
    page = await client.responses.input_items.list(two.id, order="asc")
    kinds = [(item.type, getattr(item, "role", None)) for item in page.data]
    user = ("message", "user")
    called = [("function_call", None), ("function_call_output", None)]
    assert kinds == [user, *called, user, ("message", "assistant"), user]
    for item in page.data:
        TypeAdapter(ResponseItem).validate_python(item.to_dict())
    assert page.data[1].arguments == '{"a": 1}'
    assert page.data[4].to_dict() == one.output[0].to_dict()
    ids = [item.id for item in page.data]
    assert len(set(ids)) == len(ids)
    assert [item.id async for item in client.responses.input_items.list(two.id, limit=2)] == ids[::-1]
    first = await client.responses.input_items.list(one.id, order="asc")
    assert [item.id for item in first.data] == ids[:4]
    wrong: list[dict[str, Any]] = [{"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "msg_1"}]
    for fields in wrong:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.input_items.list(two.id, **fields)
        assert refused.value.param == next(iter(fields))


async def test_input_tokens_are_those_of_the_answer(server: Server) -> None:
    episode = await server.open()
    client = server.client(episode)
    one, two = await conversation(client, episode["model"])
    fields: Any = {"instructions": "Be brief.", "tools": [ADD]}
    prompt_tokens = two.to_dict()["usage"]["input_tokens"]  # type: ignore[index]
    counted = await client.responses.input_tokens.count(input="Bye", previous_response_id=one.id, **fields)
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", prompt_tokens)
    wrong: Any = [{"role": "tool", "content": "x"}]
    with pytest.raises(openai.NotFoundError):
        await client.responses.input_tokens.count(input="x", model="gpt-4.1")
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.input_tokens.count(input=wrong)
    assert str(refused.value.param).startswith("input")
    assert [segment.num_turns for segment in (await server.finish(episode)).segments] == [2]


async def test_a_deleted_response_is_gone_and_stays_recorded(server: Server) -> None:
    episode, other = await server.open(), await server.open()
    client = server.client(episode)
    one, two = await conversation(client, episode["model"])
    chat = await client.chat.completions.create(model=episode["model"], messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError, match="synchronous"):
        await client.responses.cancel(two.id)
    with pytest.raises(openai.BadRequestError, match="background"):
        await client.responses.retrieve(two.id, stream=True)
    await client.responses.delete(two.id)
    for of, name in ((client, two.id), (client, "resp_1"), (client, chat.id), (server.client(other), one.id)):
        for ask in (of.responses.retrieve, of.responses.delete, of.responses.input_items.list, of.responses.cancel):
            with pytest.raises(openai.NotFoundError, match=f"Response with id '{name}' not found") as missing:
                await ask(name)
            assert (missing.value.type, missing.value.param) == ("invalid_request_error", None)
        with pytest.raises(openai.BadRequestError) as refused:
            await of.responses.create(model=episode["model"], input="x", previous_response_id=name)
        assert (refused.value.param, refused.value.code) == ("previous_response_id", "previous_response_not_found")
    assert sum(segment.num_turns for segment in (await server.finish(episode)).segments) == 3


async def test_a_response_that_is_not_stored_cannot_be_retrieved_or_continued(server: Server) -> None:
    episode = await server.open()
    client = server.client(episode)
    response = await client.responses.create(model=episode["model"], input="Hello", store=False)
    with pytest.raises(openai.NotFoundError) as missing:
        await client.responses.retrieve(response.id)
    assert missing.value.code is None
    with pytest.raises(openai.BadRequestError, match=f"Previous response with id '{response.id}' not found"):
        await client.responses.create(model=episode["model"], input="x", previous_response_id=response.id)
    assert [segment.num_turns for segment in (await server.finish(episode)).segments] == [1]


async def test_another_server_knows_what_is_stored_and_deleted(make_bench: Any) -> None:
    bench: Bench = await make_bench("One.", "Two.")
    episode = await bench.open()
    answers = [await episode.answer(asked(api="responses", input=text, metadata={"k": text})) for text in "ab"]
    for answer in answers:
        await answer.whole()
    one, two = (answer.head.answer_id for answer in answers)
    before = await answer_stored(episode, "GET", two, "", "")
    await answer_stored(episode, "DELETE", one, "", "")
    again = await bench.restart().find(episode.handle)
    assert await answer_stored(again, "GET", two, "", "") == before
    assert (before["metadata"], before["output"][0]["content"][0]["text"]) == ({"k": "b"}, "Two.")
    assert await again.find_response(one) is None
    late = await again.answer(asked(api="responses", input="c"))
    await late.whole()
    assert await episode.find_response(late.head.answer_id), "recorded by the other server under the same lease"
