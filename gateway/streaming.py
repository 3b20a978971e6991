"""A `PendingAnswer` as an HTTP response: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from penstock.common import cancel_and_wait
from penstock.gateway.errors import GatewayError
from penstock.gateway.requests import PendingAnswer, Update
from penstock.gateway.wire.types import Choice, CompletionRequest, InvalidRequest
from penstock.gateway.wire.wires import WIRES, EventStream

QUIET_S = 5.0
"""A stream silent for this long sends `Wire.keep_alive`; before the first one, errors are still HTTP statuses."""


async def respond(http: Request, request: CompletionRequest, call: PendingAnswer) -> Response:
    """Responds in the form that `request` wants; another request may have started `call`. Raises its errors."""
    if request.stream:
        return await stream(request, call)
    choices = await _whole(http, call)
    if choices is None:
        return Response(status_code=499)  # the client has disconnected
    return JSONResponse(WIRES[request.api].answer(request, call.head, choices))


async def _whole(http: Request, call: PendingAnswer) -> list[Choice] | None:
    """None where the client disconnected; the answer is completed without it."""
    making, leaving = asyncio.ensure_future(call.whole()), asyncio.ensure_future(_until_disconnected(http))
    try:
        await asyncio.wait({making, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return making.result() if making.done() else None
    finally:
        await cancel_and_wait([making, leaving])


async def _until_disconnected(http: Request) -> None:
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
    wire = WIRES[request.api]
    events = _events(wire.stream(request, call.head), first, updates, wire.keep_alive)
    return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def _events(
    stream: EventStream, first: Update | None, updates: AsyncGenerator[Update | None], keep_alive: bytes
) -> AsyncIterator[bytes]:
    async with aclosing(updates):
        yield stream.start() + _event(stream, first, keep_alive)
        try:
            async for update in updates:
                if event := _event(stream, update, keep_alive):
                    yield event
            yield stream.end()
        except GatewayError as error:
            yield stream.fail(error.status, str(error))
        except InvalidRequest as error:
            yield stream.fail(400, str(error))


def _event(stream: EventStream, update: Update | None, keep_alive: bytes) -> bytes:
    if update is None:
        return keep_alive
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
