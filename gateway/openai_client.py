"""An `openai.AsyncOpenAI` client whose requests go to this process's recording code: no socket, no HTTP server.

client ──httpx2 request──► parse ──► CapturedEpisode.answer ──► body or events ──httpx2 response──► client

Imports the `openai` package and its HTTP client; loaded only where an agent is run.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai

from penstock.agent_loops import InfraFailure
from penstock.gateway.errors import CaptureError, Gone, NoEpisode, NotNow, refusal_of
from penstock.gateway.requests import Call
from penstock.gateway.session import CapturedEpisode
from penstock.gateway.streaming import BODIES, stream
from penstock.gateway.wire import (
    Ask,
    BadAsk,
    model_body,
    model_list_body,
    parse_chat,
    parse_completion,
    parse_response,
)

BASE_URL = "http://penstock.invalid/v1"
"""Never looked up: the transport answers. `.invalid` cannot exist (RFC 2606), so nothing can leak to a host."""
RETRY_HEADER = "x-stainless-retry-count"
PARSERS = {"/v1/chat/completions": parse_chat, "/v1/completions": parse_completion, "/v1/responses": parse_response}


class RecordingTransport(httpx2.AsyncBaseTransport):
    """Answers requests from one episode. `failure`: the first one of ours, which ends the episode, swallowed or not."""

    def __init__(self, episode: CapturedEpisode) -> None:
        self.failure: InfraFailure | None = None
        self._episode = episode

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        body = await request.aread()
        try:
            return await self._answer(request, body)
        except (BadAsk, CaptureError) as error:
            self._note(error)
            refusal = refusal_of(error)
            return httpx2.Response(refusal.status, json=refusal.body, headers=dict(refusal.headers))

    async def _answer(self, request: httpx2.Request, body: bytes) -> httpx2.Response:
        path = request.url.path
        if request.method == "GET" and path.startswith("/v1/models"):
            return httpx2.Response(200, json=self._models(path))
        if request.method != "POST" or path not in PARSERS:
            raise NoEpisode(f"{request.method} {path} is nothing that an agent can ask for here")
        ask: Ask = PARSERS[path](_json(body))
        retried = request.headers.get(RETRY_HEADER, "0") not in ("", "0")
        call = await self._episode.answer(ask, retried=retried)
        if not ask.stream:
            return httpx2.Response(200, json=BODIES[ask.api](ask, call.head, await call.whole()))
        events = await stream(ask, call)
        return httpx2.Response(
            200, headers={"content-type": "text/event-stream"}, content=self._watched(events.body_iterator, call)
        )

    async def _watched(self, events: Any, call: Call) -> AsyncIterator[bytes]:
        """A stream tells its failure as an event; here it is noted as well."""
        async for event in events:
            yield event
        try:
            await call.whole()
        except CaptureError as error:
            self._note(error)

    def _models(self, path: str) -> dict[str, Any]:
        model = model_body(self._episode.parts.model, 0)
        return model_list_body([model]) if path == "/v1/models" else model

    def _note(self, error: BadAsk | CaptureError) -> None:
        if self.failure is None and isinstance(error, NotNow | Gone):
            self.failure = _ours(error, self._episode)


def make_client(transport: RecordingTransport) -> openai.AsyncOpenAI:
    """Retries nothing: the rollout client underneath has tried every server within its deadline."""
    http = httpx2.AsyncClient(transport=transport, trust_env=False)
    return openai.AsyncOpenAI(base_url=BASE_URL, api_key="of-this-process", http_client=http, max_retries=0)


def _ours(error: CaptureError, episode: CapturedEpisode) -> InfraFailure:
    """Refusals for our own reasons say "component: reason"."""
    if episode.broken is not None:
        return InfraFailure(episode.broken.component, episode.broken.reason)
    component, _, reason = str(error).removeprefix("the ").partition(": ")
    return InfraFailure(component, reason) if reason else InfraFailure("rollout", str(error))


def _json(body: bytes) -> Any:
    try:
        return json.loads(body or b"{}", parse_constant=lambda name: math.nan)
    except (ValueError, RecursionError) as error:
        raise BadAsk("", f"the body is no JSON: {error}", "invalid_value") from error
