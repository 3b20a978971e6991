"""HTTP routes of recorded episodes. The run's token opens all of them, an episode's key its ``/v1/``."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from penstock.gateway.errors import GatewayError, errors_for, refusal_of
from penstock.gateway.requests import is_retry, parse_json
from penstock.gateway.session import GatewaySession
from penstock.gateway.sessions import SessionManager, episode_key
from penstock.gateway.stored_responses import STORED, answer_stored, count_input
from penstock.gateway.streaming import respond
from penstock.gateway.wire.answers import model_body, model_list_body
from penstock.gateway.wire.messages import CountBody, parse_count_tokens
from penstock.gateway.wire.messages_answers import CountAnswer, anthropic_model_body, anthropic_models_body
from penstock.gateway.wire.responses import ResponseBody
from penstock.gateway.wire.types import CompletionRequest, InvalidRequest
from penstock.gateway.wire.wires import ANTHROPIC_ERRORS, OPENAI_ERRORS, WIRES, ErrorFormat, Wire
from penstock.transfer_queue import Outcome, OutcomeKind

MAX_BODY_BYTES = 16 << 20
"""A context of a million tokens, escaped, is some 6 MB; a body is read whole before it is looked at."""
PARSERS = ThreadPoolExecutor(2, thread_name_prefix="body")
"""Long bodies that are parsed at once in a process: further ones wait, so that they cannot hold up all other work."""


class OpenBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    wait_s: float = Field(0.0, ge=0, le=600, description="How long to wait for the queue to give an episode.")


class RewardBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    reward: FiniteFloat
    turn_rewards: list[FiniteFloat] | None = Field(None, description="One per answer, in the order of answers.")


class FinishBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    outcome: Literal["completed", "truncated", "policy_error", "infra_error", "cancelled"] | None = None
    reason: str = Field("", max_length=2000)


Route = Callable[..., Awaitable[Response]]
FindManager = Callable[[], Awaitable[SessionManager]]
"""Returns the session manager, once the tokenizer is loaded."""
FindSession = Callable[[str], Awaitable[GatewaySession]]
"""Returns a session by its handle. Raises `GatewayError`."""


def make_router(manager: FindManager, url: str, token: str, version: Callable[[], int]) -> APIRouter:
    """Makes all routes of recorded episodes.

    Args:
        url: URL of this server for agents.
        version: returns the loaded policy version.
    """
    router = APIRouter(responses=_refusals_in(OPENAI_ERRORS))

    async def find(handle: str) -> GatewaySession:
        return await (await manager()).find(handle)

    @router.post("/episodes", openapi_extra=_takes(OpenBody))
    @_with_refusals
    async def open_episode(request: Request) -> Response:
        """Lease the next episode of the run."""
        wait_s = (await _read(request, OpenBody)).wait_s
        body = _opened(await (await manager()).open(wait_s, request.is_disconnected), url, token)
        return JSONResponse(json.loads(json.dumps(body, default=str)))  # rows may hold other values than JSON's

    @router.get("/episodes/{handle}")
    @_with_refusals
    async def look(request: Request, handle: str) -> Response:
        """Return what is recorded so far, and the rest of the budget."""
        return JSONResponse((await find(handle)).state())

    @router.post("/episodes/{handle}/reward", openapi_extra=_takes(RewardBody))
    @_with_refusals
    async def reward(request: Request, handle: str) -> Response:
        """Set the episode's reward; durable at once. The last one counts."""
        posted = await _read(request, RewardBody)
        episode = await find(handle)
        episode.check_open()
        await episode.note(reward=posted.reward, turn_rewards=posted.turn_rewards)
        return JSONResponse(episode.state())

    @router.post("/episodes/{handle}/finish", openapi_extra=_takes(FinishBody))
    @_with_refusals
    async def finish(request: Request, handle: str) -> Response:
        """Complete the episode; repeated calls return the first result."""
        posted = await _read(request, FinishBody)
        outcome = None
        if posted.outcome is not None:
            kind = OutcomeKind(posted.outcome)
            outcome = Outcome(kind, posted.reason, "agent" if kind is OutcomeKind.INFRA_ERROR else "")
        return JSONResponse(asdict(await (await manager()).finish(handle, outcome)))

    router.include_router(make_client_router(find, version))
    return router


def make_client_router(find: FindSession, version: Callable[[], int]) -> APIRouter:
    """Makes the routes of agents, ``/episodes/{handle}/v1/…``."""
    router = APIRouter(responses=_refusals_in(OPENAI_ERRORS))

    def add(wire: Wire) -> None:
        answer = {"description": "The API's answer, whole or as events", "content": {"text/event-stream": {}}}
        path, responses = f"/episodes/{{handle}}/v1/{wire.path}", _refusals_in(wire.errors) | {200: answer}

        @router.post(path, openapi_extra=_takes(wire.body), responses=responses)
        @_with_refusals
        async def ask(request: Request, handle: str) -> Response:
            """Answers like the API's own route. The answer is recorded before it ends."""
            completion = await parse_body(wire.parse, await request.body())
            episode = await find(handle)
            return await respond(
                request, completion, await episode.answer(completion, retried=is_retry(request.headers))
            )

    for wire in WIRES.values():
        add(wire)
    counted = _refusals_in(ANTHROPIC_ERRORS) | {200: {"model": CountAnswer}}

    @router.post("/episodes/{handle}/v1/messages/count_tokens", openapi_extra=_takes(CountBody), responses=counted)
    @_with_refusals
    async def count_tokens(request: Request, handle: str) -> Response:
        """Tokens that the model would be fed for these messages; nothing is sampled."""
        prompt = await parse_body(parse_count_tokens, await request.body())
        return JSONResponse({"input_tokens": await (await find(handle)).count(prompt)})

    _add_stored_responses(router, find)

    def described(request: Request, episode: GatewaySession, name: str) -> dict[str, Any]:
        if errors_for(request.scope) is ANTHROPIC_ERRORS:
            return anthropic_model_body(name)
        return model_body(name, max_model_len=episode.context.context_limit(), policy_version=version())

    @router.get("/episodes/{handle}/v1/models")
    @_with_refusals
    async def models(request: Request, handle: str) -> Response:
        episode = await find(handle)
        bodies = [described(request, episode, name) for name in episode.context.models]
        as_list = anthropic_models_body if errors_for(request.scope) is ANTHROPIC_ERRORS else model_list_body
        return JSONResponse(as_list(bodies))

    @router.get("/episodes/{handle}/v1/models/{model:path}")
    @_with_refusals
    async def model(request: Request, handle: str, model: str) -> Response:
        episode = await find(handle)
        episode.context.check_model(model)
        return JSONResponse(described(request, episode, model))

    return router


def _add_stored_responses(router: APIRouter, find: FindSession) -> None:
    @router.post("/episodes/{handle}/v1/responses/input_tokens", openapi_extra=_takes(ResponseBody, any_absent=True))
    @_with_refusals
    async def input_tokens(request: Request, handle: str) -> Response:
        """Tokens that the model would be fed for this input; nothing is sampled."""
        return JSONResponse(await count_input(await find(handle), parse_json(await request.body())))

    def add_stored(method: str, part: str, description: str | None) -> None:
        path = f"/episodes/{{handle}}/v1/responses/{{response_id}}{'/' if part else ''}{part}"

        @router.api_route(path, methods=[method], description=description)
        @_with_refusals
        async def stored(request: Request, handle: str, response_id: str) -> Response:
            return JSONResponse(await answer_stored(await find(handle), method, response_id, part, request.url.query))

    for (method, part), serve in STORED.items():
        add_stored(method, part, serve.__doc__)


def _refusals_in(errors: ErrorFormat) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": errors.schema} for status in (400, 401, 404, 409, 410, 413, 501, 503)}


# answers -----------------------------------------------------------------------------------------------------------
def _opened(episode: GatewaySession, url: str, token: str) -> dict[str, Any]:
    task, lease = episode.lease.task, episode.lease
    config = episode.context.config.of_source(task.data_source)
    return {
        "episode_id": lease.episode_id,
        "handle": episode.handle,
        "base_url": f"{url}/episodes/{episode.handle}/v1",
        "anthropic_base_url": f"{url}/episodes/{episode.handle}",
        "api_key": episode_key(token, episode.handle),
        "model": episode.context.model,
        "task": {
            "task_id": task.task_id,
            "split": task.split,
            "messages": list(task.messages),
            "data_source": task.data_source,
            "agent_name": task.agent_name,
            "extra_info": dict(task.extra_info),
        },
        "deadline_s": config.episode_deadline_s,
        "idle_s": config.capture.idle_s,
        "max_turns": config.max_turns,
        "max_response_tokens": config.max_response_tokens,
        "member": lease.member,
        "attempt": lease.attempt,
        "min_version": lease.min_version,
    }


# requests ----------------------------------------------------------------------------------------------------------
async def _read(request: Request, kind: type[Any]) -> Any:
    """The body as `kind`; an empty body means all defaults. Raises `InvalidRequest`."""
    try:
        return kind.model_validate(parse_json(await request.body()))
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidRequest(".".join(map(str, first["loc"])), first["msg"], "invalid_value") from error


async def parse_body(parse: Callable[[Any], CompletionRequest], body: bytes) -> CompletionRequest:
    """Parses a request, a long one in a thread. Raises `InvalidRequest`."""
    if len(body) < 100_000:  # a longer body is parsed in a thread: it may hold millions of values
        return parse(parse_json(body))
    return await asyncio.get_running_loop().run_in_executor(PARSERS, lambda: parse(parse_json(body)))


def _with_refusals(route: Route) -> Route:
    """Converts errors to HTTP responses in the shape that the client reads."""

    @functools.wraps(route)
    async def answered(request: Request, **named: Any) -> Response:
        try:
            return await route(request, **named)
        except (InvalidRequest, GatewayError) as error:
            refusal = refusal_of(error, errors_for(request.scope))
            return JSONResponse(refusal.body, refusal.status, refusal.headers)

    return answered


def _takes(body: type[BaseModel], *, any_absent: bool = False) -> dict[str, Any]:
    """The request body for OpenAPI, without needed fields where `any_absent`.

    FastAPI does not parse it, so that errors name fields as OpenAI's do.
    """
    schema = body.model_json_schema()
    whole = _inlined(schema, schema.pop("$defs", {}))
    if any_absent:
        whole.pop("required", None)
    required = bool(whole.get("required"))
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": whole}}}}


def _inlined(schema: Any, known: dict[str, Any]) -> Any:
    """`schema` with its references replaced by what they refer to."""
    if isinstance(schema, list):
        return [_inlined(one, known) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(known[schema["$ref"].rpartition("/")[2]], known)
    return {name: _inlined(one, known) for name, one in schema.items() if name != "discriminator"}
