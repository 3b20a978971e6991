"""Bodies as they are declared for OpenAPI: what is answered fits, what is declared is taken.

Errors and models as the `openai` package reads them.
"""

from __future__ import annotations

from typing import Any

import httpx2
import jsonschema
import openai
import pytest
from openai import AsyncOpenAI
from openai.types import Model

from penstock.gateway.errors import ClientErrors, refusal_of
from penstock.gateway.wire.answers import (
    KEEP_ALIVE,
    SSE_DONE,
    OpenAIErrorBody,
    error_body,
    model_body,
    model_list_body,
    sse_data,
)
from penstock.gateway.wire.chat import ChatBody, parse_chat
from penstock.gateway.wire.types import InvalidRequest

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}


def test_harmless_fields_are_declared() -> None:
    schema = ChatBody.model_json_schema()
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid({**CHAT, "store": True, "user": "u", "tool_choice": "none"})
    assert not validator.is_valid({**CHAT, "logit_bias": {}})
    assert not validator.is_valid({**CHAT, "tool_choice": "required"})
    assert parse_chat({**CHAT, "store": True, "user": "u", "tool_choice": "none"})


def client_for(answer: httpx2.Response) -> AsyncOpenAI:
    http = httpx2.AsyncClient(transport=httpx2.MockTransport(lambda request: answer))
    return AsyncOpenAI(base_url="http://episode/v1", api_key="key", http_client=http, max_retries=0)


@pytest.mark.parametrize(
    ("status", "raised", "code"),
    [
        (400, openai.BadRequestError, None),
        (401, openai.AuthenticationError, "invalid_api_key"),
        (404, openai.NotFoundError, None),
        (409, openai.ConflictError, "conflict"),
        (410, openai.APIStatusError, "gone"),
        (429, openai.RateLimitError, "rate_limit_exceeded"),
        (503, openai.InternalServerError, "overloaded"),
        (418, openai.APIStatusError, None),
    ],
)
async def test_errors_by_status(status: int, raised: type[openai.APIStatusError], code: str | None) -> None:
    body = error_body(status, "what happened", "messages")
    OpenAIErrorBody.model_validate(body)
    with pytest.raises(raised, match="what happened") as error:
        await client_for(httpx2.Response(status, json=body)).models.list()
    assert (error.value.status_code, error.value.code, error.value.param) == (status, code, "messages")


@pytest.mark.parametrize(
    ("path", "expected"),
    [("chat/completions", {"message": "too long", "param": "n"}), ("messages", {"message": "too long"})],
)
async def test_error_of_another_layer_in_pieces_is_one_of_the_clients_own(path: str, expected: dict[str, str]) -> None:
    async def refuse(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"48")]})
        for piece, more in ((b'{"error": {"message": ', True), (b'"too long", "field": "n"}}', False)):
            await send({"type": "http.response.body", "body": piece, "more_body": more})

    app: Any = ClientErrors(refuse, refuse)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app)) as http:
        answer = await http.post(f"http://x/episodes/e/v1/{path}")
    error = answer.json()["error"]
    assert "type" in error
    assert {name: error[name] for name in expected} == expected
    assert answer.headers.get_list("content-length") == [str(len(answer.content))]


def test_a_bad_ask_names_the_field() -> None:
    assert refusal_of(InvalidRequest("n", "must be small", "invalid_value")).body["error"] == {
        "message": "n: must be small",
        "type": "invalid_request_error",
        "param": "n",
        "code": "invalid_value",
    }


async def test_models() -> None:
    body = model_body("tiny", max_model_len=512)
    found = await client_for(httpx2.Response(200, json=model_list_body([body]))).models.list()
    assert [model.model_dump(exclude_unset=True) for model in found.data] == [body]
    one = await client_for(httpx2.Response(200, json=body)).models.retrieve("tiny")
    assert Model.model_validate(one.model_dump()) == one


async def test_signs_of_life_are_skipped_by_the_client() -> None:
    chunk = {"id": "c", "object": "text_completion", "created": 1, "model": "m", "choices": []}
    content = KEEP_ALIVE + sse_data(chunk) + KEEP_ALIVE + SSE_DONE
    answer = httpx2.Response(200, content=content, headers={"content-type": "text/event-stream"})
    stream = await client_for(answer).completions.create(model="m", prompt="x", stream=True)
    assert len([one async for one in stream]) == 1


def test_a_line_separator_in_a_text_does_not_end_an_event() -> None:
    assert sse_data({"text": "a\u2028b\n\u0085"}).count(b"\n") == 2
    assert sse_data({"text": "a\u2028b\n\u0085"}).isascii()
