"""An `openai.AsyncOpenAI` client whose requests are answered in this process: no socket, no HTTP server.

client ──httpx2 request──► parse ──► GatewaySession.answer ──► body or events ──httpx2 response──► client

Imports the `openai` package and its HTTP client; imported only to run an agent.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai

from penstock.agent_loops import InfraFailure
from penstock.gateway.errors import GatewayError, Gone, NoEpisode, NotNow, refusal_of
from penstock.gateway.recorded_loop import infra_failure_of
from penstock.gateway.requests import PendingAnswer, is_retry, parse_json
from penstock.gateway.session import GatewaySession
from penstock.gateway.stored_responses import answer_stored, count_input
from penstock.gateway.streaming import stream
from penstock.gateway.wire.answers import model_body, model_list_body
from penstock.gateway.wire.types import InvalidRequest
from penstock.gateway.wire.wires import OPENAI_ERRORS, WIRES

ROUTES = {f"/v1/{wire.path}": wire for wire in WIRES.values() if wire.errors is OPENAI_ERRORS}


class RecordingTransport(httpx2.AsyncBaseTransport):
    """Answers requests from one session. `failure`: the first infrastructure failure; it ends the episode."""

    def __init__(self, episode: GatewaySession) -> None:
        self.failure: InfraFailure | None = None
        self._episode = episode

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        body = await request.aread()
        try:
            return await self._answer(request, body)
        except (InvalidRequest, GatewayError) as error:
            self._note(error)
            refusal = refusal_of(error)
            return httpx2.Response(refusal.status, json=refusal.body, headers=dict(refusal.headers))

    async def _answer(self, request: httpx2.Request, body: bytes) -> httpx2.Response:
        path = request.url.path
        if request.method == "GET" and path.startswith("/v1/models"):
            return httpx2.Response(200, json=self._models(path))
        if request.method == "POST" and path == "/v1/responses/input_tokens":
            return httpx2.Response(200, json=await count_input(self._episode, parse_json(body)))
        if path.startswith("/v1/responses/"):
            response_id, _, part = path.removeprefix("/v1/responses/").partition("/")
            query = request.url.query.decode()
            return httpx2.Response(
                200, json=await answer_stored(self._episode, request.method, response_id, part, query)
            )
        if request.method != "POST" or path not in ROUTES:
            raise NoEpisode(f"{request.method} {path} is not available to agents")
        completion = ROUTES[path].parse(parse_json(body))
        call = await self._episode.answer(completion, retried=is_retry(request.headers))
        if not completion.stream:
            return httpx2.Response(200, json=ROUTES[path].answer(completion, call.head, await call.whole()))
        events = await stream(completion, call)
        return httpx2.Response(
            200, headers={"content-type": "text/event-stream"}, content=self._watched(events.body_iterator, call)
        )

    async def _watched(self, events: Any, call: PendingAnswer) -> AsyncIterator[bytes]:
        """A stream reports its error as an event; it is recorded here as well."""
        async for event in events:
            yield event
        try:
            await call.whole()
        except GatewayError as error:
            self._note(error)

    def _models(self, path: str) -> dict[str, Any]:
        context, name = self._episode.context, path.removeprefix("/v1/models").removeprefix("/")
        if not name:
            return model_list_body([model_body(known) for known in context.models])
        context.check_model(name)
        return model_body(name)

    def _note(self, error: InvalidRequest | GatewayError) -> None:
        if self.failure is None and isinstance(error, NotNow | Gone):
            self.failure = infra_failure_of(error, self._episode)


def make_client(transport: RecordingTransport) -> openai.AsyncOpenAI:
    """Without retries: the rollout client has already tried every server within its deadline."""
    http = httpx2.AsyncClient(transport=transport, trust_env=False)
    # Never resolved: the transport answers. `.invalid` cannot exist (RFC 2606), so nothing can leak to a host.
    url = "http://penstock.invalid/v1"
    return openai.AsyncOpenAI(base_url=url, api_key="of-this-process", http_client=http, max_retries=0)
