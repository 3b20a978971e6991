"""Routes of /v1/responses for answers that were given: their bodies, their input, deletion, cancellation.

Nothing more is stored for them than the episode's journal, so they are found after a restart, and end with the episode.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any
from urllib.parse import parse_qs

from penstock.gateway.errors import NoResponse
from penstock.gateway.journal import head_of
from penstock.gateway.prefix_tree import Message, Turn
from penstock.gateway.session import GatewaySession
from penstock.gateway.wire.responses import LOGPROBS, output_items, output_text, parse_input_tokens
from penstock.gateway.wire.types import InvalidRequest, item_id

Query = Mapping[str, list[str]]
MAX_PAGE = 100


async def answer_stored(episode: GatewaySession, method: str, response_id: str, part: str, query: str) -> Any:
    """Answers ``METHOD /v1/responses/{response_id}/{part}?{query}``. Raises `InvalidRequest` and `GatewayError`."""
    serve = STORED.get((method, part))
    turn = await episode.find_response(response_id) if serve is not None else None
    if serve is None or turn is None:
        raise NoResponse(f"Response with id '{response_id}' not found.")
    return await serve(episode, turn, parse_qs(query))


async def retrieve(episode: GatewaySession, turn: Turn, query: Query) -> Mapping[str, Any]:
    """Return the response as it was answered; with log-probabilities where `include` asks for them."""
    if query.get("stream", ["false"])[-1].lower() != "false":
        raise InvalidRequest("stream", "only a response made with background=true can be streamed", "invalid_value")
    included = [*query.get("include", ()), *query.get("include[]", ())]
    return episode.record.response_body(turn, logprobs=LOGPROBS in included)


async def delete(episode: GatewaySession, turn: Turn, query: Query) -> Mapping[str, Any]:
    """Delete the response for clients; its tokens stay recorded, and are trained."""
    await episode.delete_response(turn.answer_id)
    return {"id": turn.answer_id, "object": "response", "deleted": True}


async def cancel(episode: GatewaySession, turn: Turn, query: Query) -> Mapping[str, Any]:
    """Refused with 400, as OpenAI does for a response that was not made in the background."""
    raise InvalidRequest("", "Cannot cancel a synchronous response.")


async def list_input(episode: GatewaySession, turn: Turn, query: Query) -> Mapping[str, Any]:
    """List the items before the answer, those of previous responses included; `limit`, `order`, `after`."""
    order = query.get("order", ["desc"])[-1]
    if order not in ("asc", "desc"):
        raise InvalidRequest("order", "must be 'asc' or 'desc'", "invalid_value")
    limit = query.get("limit", ["20"])[-1]
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= MAX_PAGE):
        raise InvalidRequest("limit", f"must be an integer from 1 to {MAX_PAGE}", "invalid_value")
    items = list(_items_before(turn))[:: 1 if order == "asc" else -1]
    ids = [item["id"] for item in items]
    start = 0
    if after := query.get("after", [""])[-1]:
        if after not in ids:
            raise InvalidRequest("after", f"{after!r} is no input item of this response", "invalid_value")
        start = ids.index(after) + 1
    page, rest = items[start : start + int(limit)], items[start + int(limit) :]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": bool(rest)}


async def count_input(episode: GatewaySession, body: Any) -> Mapping[str, Any]:
    """Tokens that the model would be fed. Raises `InvalidRequest` and `GatewayError`."""
    tokens = await episode.count(parse_input_tokens(body, episode.context.model))
    return {"object": "response.input_tokens", "input_tokens": tokens}


Serve = Callable[[GatewaySession, Turn, Query], Awaitable[Mapping[str, Any]]]
STORED: Mapping[tuple[str, str], Serve] = {
    ("GET", ""): retrieve,
    ("DELETE", ""): delete,
    ("POST", "cancel"): cancel,
    ("GET", "input_items"): list_input,
}
"""(method, part of the path after the id) → function."""


def _items_before(turn: Turn) -> Iterator[dict[str, Any]]:
    """The items of the conversation up to the answer, with the ids under which earlier answers showed theirs."""
    for one in turn.path():
        plain = [item for message in one.new for item in _items_of(message)]
        for position, item in enumerate(plain):
            kind = "msg" if item["type"] == "message" else "fc"
            yield {"id": item_id(kind, f"{one.answer_id}/input", position), **item}
        if one is not turn:
            yield from output_items(head_of(one.answer_id, one.created_s, "", one.match), one.choice)


def _items_of(message: Message) -> Iterator[dict[str, Any]]:
    """The items of one message of a client, without ids; the opposite of `plain_items`."""
    role, text, done = message["role"], message["content"], {"status": "completed"}
    calls = message.get("tool_calls") or ()
    if role == "tool":
        call = {"type": "function_call_output", "call_id": message["tool_call_id"]}
        yield {**call, "output": text, **done}
    elif text or not calls:
        content = output_text(text) if role == "assistant" else {"type": "input_text", "text": text}
        yield {"type": "message", "role": role, "content": [content], **done}
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        yield {"type": "function_call", "call_id": call["id"], "name": name, "arguments": written, **done}
