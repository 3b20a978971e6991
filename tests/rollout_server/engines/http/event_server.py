"""A real HTTP server that streams given events, as stock engines do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from penstock.rollout_server.engines.http.event_client import EngineAddress, EventClient

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[EventClient]:
    """A client of a server that answers every path by `handler`."""

    async def any_path(request: web.Request) -> web.StreamResponse:
        return await handler(request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", any_path)
    async with TestServer(app) as server:
        events = EventClient(EngineAddress(f"http://127.0.0.1:{server.port}", "key"))
        try:
            yield events
        finally:
            await events.close()


async def stream_events(
    request: web.Request, events: Iterable[dict[str, Any]], *, keep_open: bool = False
) -> web.StreamResponse:
    """Server-sent events, each sent before the next one is asked for. An iterator that raises breaks the connection."""
    response = web.StreamResponse()
    await response.prepare(request)
    try:
        for one in events:
            await response.write(f"data: {json.dumps(one)}\n\n".encode())
            await asyncio.sleep(0.01)  # a segment of its own
    except ConnectionError:
        assert request.transport is not None
        request.transport.abort()
        raise
    if keep_open:
        await asyncio.Event().wait()
    await response.write(b"data: [DONE]\n\n")
    return response


Event = dict[str, Any]
Spans = list[tuple[int, int, int]]


def vllm_event(ids: list[int], finish: str | None = None, spans: Spans | None = None, **more: Any) -> dict[str, Any]:
    """As vLLM sends it; token t has the logprob -t / 10. `spans`: (version, start, end) of the whole answer."""
    found = spans and [{"version": str(version), "start": start, "end": end} for version, start, end in spans]
    content = [{"token_id": token, "logprob": -token / 10} for token in ids]
    choice = {"token_ids": ids, "logprobs": {"content": content}, "finish_reason": finish, "weight_versions": found}
    return {"choices": [choice | more]}


def sglang_event(
    ids: list[int],
    finish: str | dict[str, Any] | None = None,
    spans: Spans | None = None,
    version: int = 0,
    **more: Any,
) -> dict[str, Any]:
    """The same of SGLang 0.5.23, whose events have the version of its front end at their receipt."""
    if spans:
        more |= {"weight_versions": [{"version": str(v), "start": start, "end": end} for v, start, end in spans]}
    reason = {"type": finish, "length": 4} if isinstance(finish, str) else finish
    pairs = [[-token / 10, token, None] for token in ids]
    meta = {"id": "ab" * 16, "finish_reason": reason, "weight_version": str(version), "output_token_logprobs": pairs}
    return {"output_ids": ids, "meta_info": meta | more}
