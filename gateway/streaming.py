"""A `PendingAnswer` as an HTTP response: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from penstock.common import cancel_and_wait
from penstock.gateway.errors import GatewayError
from penstock.gateway.requests import PendingAnswer, Update
from penstock.gateway.wire import (
    KEEP_ALIVE,
    AnswerHead,
    ChatStream,
    Choice,
    CompletionRequest,
    CompletionStream,
    InvalidRequest,
    ResponseStream,
    TextDelta,
    chat_body,
    completion_body,
    response_body,
)
from penstock.gateway.wire.types import Api

QUIET_S = 5.0
"""A stream silent for this long sends a comment; before the first one, errors are still HTTP statuses."""


class Stream(Protocol):
    def start(self) -> bytes: ...
    def feed(self, index: int, delta: TextDelta) -> bytes: ...
    def finish(self, choice: Choice) -> bytes: ...
    def end(self) -> bytes: ...
    def fail(self, status: int, message: str) -> bytes: ...


BODIES: Mapping[Api, Callable[[CompletionRequest, AnswerHead, Sequence[Choice]], dict[str, Any]]] = {
    "chat": chat_body,
    "completions": completion_body,
    "responses": response_body,
}
STREAMS: Mapping[Api, Callable[[CompletionRequest, AnswerHead], Stream]] = {
    "chat": ChatStream,
    "completions": CompletionStream,
    "responses": ResponseStream,
}


async def respond(http: Request, request: CompletionRequest, call: PendingAnswer) -> Response:
    """Responds in the form that `request` wants; another request may have started `call`. Raises its errors."""
    if request.stream:
        return await stream(request, call)
    choices = await _whole(http, call)
    if choices is None:
        return Response(status_code=499)  # the client has disconnected
    return JSONResponse(BODIES[request.api](request, call.head, choices))


async def _whole(http: Request, call: PendingAnswer) -> list[Choice] | None:
    """None where the client disconnected; the answer is completed without it."""
    making, leaving = asyncio.ensure_future(call.whole()), asyncio.ensure_future(_gone(http))
    try:
        await asyncio.wait({making, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return making.result() if making.done() else None
    finally:
        await cancel_and_wait([making, leaving])


async def _gone(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def stream(request: CompletionRequest, call: PendingAnswer) -> StreamingResponse:
    """The events. Errors before the first one are raised, later ones are events."""
    updates = _with_pauses(call.updates())
    try:
        first = await anext(updates)
    except BaseException:
        await updates.aclose()
        raise
    events = _events(STREAMS[request.api](request, call.head), first, updates)
    return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def _events(stream: Stream, first: Update | None, updates: AsyncGenerator[Update | None]) -> AsyncIterator[bytes]:
    async with aclosing(updates):
        yield stream.start() + _event(stream, first)
        try:
            async for update in updates:
                if event := _event(stream, update):
                    yield event
            yield stream.end()
        except GatewayError as error:
            yield stream.fail(error.status, str(error))
        except InvalidRequest as error:
            yield stream.fail(400, str(error))


def _event(stream: Stream, update: Update | None) -> bytes:
    if update is None:
        return KEEP_ALIVE
    index, what = update
    return stream.finish(what) if isinstance(what, Choice) else stream.feed(index, what)


async def _with_pauses(updates: AsyncGenerator[Update]) -> AsyncGenerator[Update | None]:
    """Adds None for each `QUIET_S` of silence."""
    following = asyncio.ensure_future(anext(updates))
    try:
        while True:
            done, _ = await asyncio.wait({following}, timeout=QUIET_S)
            if not done:
                yield None
                continue
            yield following.result()
            following = asyncio.ensure_future(anext(updates))
    except StopAsyncIteration:
        return
    finally:
        await cancel_and_wait([following])
        await updates.aclose()
