"""A `Call` as an HTTP answer: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from penstock.gateway.errors import CaptureError
from penstock.gateway.requests import Call, Update
from penstock.gateway.wire import (
    KEEP_ALIVE,
    Ask,
    BadAsk,
    ChatStream,
    Choice,
    CompletionStream,
    Delta,
    Head,
    ResponseStream,
    chat_body,
    completion_body,
    response_body,
)
from penstock.gateway.wire.types import Api

QUIET_S = 5.0
"""A stream in which nothing happens for so long sends a comment; until then an error still has a status of its own."""


class Stream(Protocol):
    def start(self) -> bytes: ...
    def feed(self, index: int, delta: Delta) -> bytes: ...
    def finish(self, choice: Choice) -> bytes: ...
    def end(self) -> bytes: ...
    def fail(self, status: int, message: str) -> bytes: ...


BODIES: Mapping[Api, Callable[[Ask, Head, Sequence[Choice]], dict[str, Any]]] = {
    "chat": chat_body,
    "completions": completion_body,
    "responses": response_body,
}
STREAMS: Mapping[Api, Callable[[Ask, Head], Stream]] = {
    "chat": ChatStream,
    "completions": CompletionStream,
    "responses": ResponseStream,
}


async def respond(request: Request, ask: Ask, call: Call) -> Response:
    """`ask` says how this client wants it; `call` may have been begun by another request. Raises what the call does."""
    if ask.stream:
        return await stream(ask, call)
    choices = await _whole(request, call)
    if choices is None:
        return Response(status_code=499)  # nobody reads it
    return JSONResponse(BODIES[ask.api](ask, call.head, choices))


async def _whole(request: Request, call: Call) -> list[Choice] | None:
    """None where the client went away; the call goes on without it."""
    making, leaving = asyncio.ensure_future(call.whole()), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({making, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return making.result() if making.done() else None
    finally:
        for task in (making, leaving):
            task.cancel()
        await asyncio.gather(making, leaving, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def stream(ask: Ask, call: Call) -> StreamingResponse:
    """Events; an error before the first of them is raised. Raises what the call does."""
    updates = _with_pauses(call.updates())
    try:
        first = await anext(updates)
    except BaseException:
        await updates.aclose()
        raise
    events = _events(STREAMS[ask.api](ask, call.head), first, updates)
    return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def _events(stream: Stream, first: Update | None, updates: AsyncGenerator[Update | None]) -> AsyncIterator[bytes]:
    async with aclosing(updates):
        yield stream.start() + _event(stream, first)
        try:
            async for update in updates:
                if event := _event(stream, update):
                    yield event
            yield stream.end()
        except CaptureError as error:
            yield stream.fail(error.status, str(error))
        except BadAsk as error:
            yield stream.fail(400, str(error))


def _event(stream: Stream, update: Update | None) -> bytes:
    if update is None:
        return KEEP_ALIVE
    index, what = update
    return stream.finish(what) if isinstance(what, Choice) else stream.feed(index, what)


async def _with_pauses(updates: AsyncGenerator[Update]) -> AsyncGenerator[Update | None]:
    """None wherever nothing came for `QUIET_S`."""
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
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await updates.aclose()
