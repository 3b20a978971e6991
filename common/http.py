"""Parts that every HTTP server shares: bearer tokens, body limits, one error body, OpenAPI. `http_server` runs the app.

    app = FastAPI()
    add_error_handlers(app, {QueueFull: lambda error: error_response(429, "", str(error), retry_after_s=1)})
    complete_openapi(app, {"401": "No token of this run", "422": "The request is wrong"})
    async with HttpServer(RequireToken(LimitBody(app), token), listen(host, port)) as server:
        print(server.url)

Layers around an app (`RequireToken`, `LimitBody`) apply to all its routes, known or not.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

if TYPE_CHECKING:
    from fastapi import FastAPI

MAX_BODY_BYTES = 64 << 20


# error body --------------------------------------------------------------------------------------------------------
class ErrorDetail(BaseModel):
    """Describes a mistake for people and programs."""

    field: str
    """Dotted name of the wrong field of the request; empty if it is not one field."""
    message: str


class ErrorBody(BaseModel):
    """Body of every status of 400 and above."""

    error: ErrorDetail


class HttpError(Exception):
    """Raised by routes and by `RequireToken`'s functions; answered as `error_response` does."""

    def __init__(self, status: int, field: str, message: str, **extra: Any) -> None:
        super().__init__(message)
        self.status, self.field, self.extra = status, field, extra

    @property
    def response(self) -> JSONResponse:
        """The response that is sent."""
        return error_response(self.status, self.field, str(self), **self.extra)


def error_response(
    status: int,
    field: str | None,
    message: str,
    *,
    headers: Mapping[str, str] | None = None,
    retry_after_s: float | None = None,
    **extra: Any,
) -> JSONResponse:
    """``{"error": {"field", "message", …}}``.

    Args:
        field: what in the request is wrong, dotted; empty for nothing in particular, None leaves the key out.
        retry_after_s: seconds for Retry-After, rounded up to 1 or more.
        extra: further keys, those that are not None.
    """
    detail = {"field": field, "message": message, **extra}
    response = JSONResponse({"error": {key: value for key, value in detail.items() if value is not None}}, status)
    response.headers.update(headers or {})
    if retry_after_s is not None:
        response.headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
    return response


def add_error_handlers(
    app: FastAPI,
    errors: Mapping[type[Exception], Callable[[Any], Response]] | None = None,
    *,
    no_field: str | None = "",
    with_body_prefix: bool = False,
) -> None:
    """Gives every refusal the body of `error_response`: `HttpError`, FastAPI's and Starlette's, `errors`, mistakes.

    Args:
        errors: exception type → its response.
        no_field: `field` if it is not one field.
        with_body_prefix: fields of a wrong body are ``body.NAME``.
    """
    from fastapi.exceptions import RequestValidationError

    async def of_http_error(_: Request, error: Any) -> Response:
        response: Response = error.response
        return response

    async def of_validation(request: Request, error: Any) -> Response:
        field, message = _first_mistake(request, error.errors()[0], with_body_prefix)
        return error_response(422, field or no_field, message)

    async def of_starlette(request: Request, error: Any) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return error_response(error.status_code, no_field, message, headers=error.headers)

    async def of_mistake(request: Request, error: Exception) -> Response:
        message = f"{request.method} {request.url.path} failed here: {type(error).__name__}"
        return error_response(500, no_field, message)

    def handler(respond: Callable[[Any], Response]) -> Callable[[Request, Exception], Any]:
        async def handle(_: Request, error: Exception) -> Response:
            return respond(error)

        return handle

    app.add_exception_handler(HttpError, of_http_error)
    app.add_exception_handler(RequestValidationError, of_validation)
    app.add_exception_handler(HTTPException, of_starlette)
    app.add_exception_handler(Exception, of_mistake)
    for kind, respond in (errors or {}).items():
        app.add_exception_handler(kind, handler(respond))


def _first_mistake(request: Request, first: Mapping[str, Any], with_prefix: bool) -> tuple[str, str]:
    """(field, message) of the first mistake. Its input is left out: it may be anything, NaN and half characters too."""
    if first["type"] == "json_invalid":
        return "", f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}"
    if first["loc"] == ("body",) and "json" not in request.headers.get("content-type", ""):
        return "", "the body must be JSON, sent with Content-Type: application/json"
    location = first["loc"] if with_prefix else [part for part in first["loc"] if part != "body"]
    field = ".".join(str(part) for part in location)
    return field, f"{field or 'body'}: {first['msg']}"


# access ------------------------------------------------------------------------------------------------------------
Authorize = Callable[[Scope, str], Mapping[str, Any] | None]
"""(scope, bearer token) → what joins ``request.state``, perhaps nothing; None: 401. May raise `HttpError` (403)."""


def same_token(token: str, expected: str) -> bool:
    """Compares in constant time; no token equals an empty one."""
    return bool(expected) and hmac.compare_digest(_bytes(token), _bytes(expected))


def bearer_headers(token: str) -> dict[str, str]:
    """The Authorization header that carries `token`; none for an empty one."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def bearer_token(authorization: bytes | str) -> str:
    """The token of an Authorization header; empty if it carries none. Compare it by `same_token`."""
    text = authorization if isinstance(authorization, str) else authorization.decode("utf-8", "surrogateescape")
    scheme, _, token = text.partition(" ")
    return token if scheme == "Bearer" else ""


def opens(
    token: str, also: Mapping[str, str] | None = None, *, further: Callable[[str, str], bool] | None = None
) -> Authorize:
    """`token` opens every path.

    Args:
        also: path → a token that opens this path alone; an empty one opens nothing.
        further: (path, token) → whether that token opens that path; compares in constant time.
    """

    def authorize(scope: Scope, sent: str) -> Mapping[str, Any] | None:
        path = scope["path"]
        if same_token(sent, token) or same_token(sent, (also or {}).get(path, "")):
            return {}
        return {} if sent and further is not None and further(path, sent) else None

    return authorize


class RequireToken:
    """ASGI layer: 401 for every request without a bearer token that `authorize` accepts."""

    def __init__(
        self,
        app: ASGIApp,
        authorize: str | Authorize,
        *,
        prefix: str = "/",
        message: str = "a bearer token of this server is needed",
        field: str | None = "authorization",
    ) -> None:
        """Args:
        authorize: the one token, not empty, or a function.
        prefix: paths that need a token; all others are open.
        message, field: of the 401.
        """
        if not authorize:
            raise ValueError("the server needs a token")
        self.app = app
        self._authorize = opens(authorize) if isinstance(authorize, str) else authorize
        self._prefix = prefix
        self._message, self._field = message, field

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or not scope["path"].startswith(self._prefix):
            await self.app(scope, receive, send)
            return
        try:
            state = self._authorize(scope, bearer_token(header(scope, b"authorization")))
        except HttpError as error:
            await error.response(scope, receive, send)
            return
        if state is None:
            challenge = {"WWW-Authenticate": "Bearer"}
            await error_response(401, self._field, self._message, headers=challenge)(scope, receive, send)
            return
        scope.setdefault("state", {}).update(state)
        await self.app(scope, receive, send)


class LimitBody:
    """ASGI layer: 413 for bodies over `max_bytes`, announced or sent, before they fill this process's memory."""

    def __init__(self, app: ASGIApp, max_bytes: int = MAX_BODY_BYTES, *, no_field: str | None = "") -> None:
        self.app = app
        self._max_bytes = max_bytes
        self._no_field = no_field

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = f"the body is longer than {self._max_bytes} bytes"
        length = header(scope, b"content-length")
        if length.isdigit() and int(length) > self._max_bytes:
            await error_response(413, self._no_field, message)(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            part = await receive()
            received += len(part.get("body", b""))
            if received > self._max_bytes:
                raise HTTPException(413, message)
            return part

        await self.app(scope, counted, send)


def header(scope: Scope, name: bytes) -> bytes:
    """The first header of that lower-case name; empty if there is none."""
    return next((value for key, value in scope.get("headers", []) if key == name), b"")


def _bytes(token: str) -> bytes:
    return token.encode("utf-8", "surrogateescape")


# OpenAPI -----------------------------------------------------------------------------------------------------------
Refusals = Mapping[str, str] | Callable[[str], Mapping[str, str]]
"""Status → description, of every route or by its path."""


def complete_openapi(
    app: FastAPI, refusals: Refusals, models: Sequence[type[BaseModel]] = (), error_body: type[BaseModel] = ErrorBody
) -> None:
    """Completes ``app.openapi()``, also for routes added later: the bearer token, refusals and their body, `models`.

    Args:
        models: those that FastAPI does not see, lines of a streamed response for instance.
        error_body: the body of every status of 400 and above.
    """
    made_by_fastapi = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _complete(made_by_fastapi(), refusals, (error_body, *models))
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def content_of(media_type: str, model: str) -> dict[str, Any]:
    """OpenAPI's ``content`` of a body that is one of the `models`."""
    return {media_type: {"schema": {"$ref": f"#/components/schemas/{model}"}}}


def _complete(schema: dict[str, Any], refusals: Refusals, models: Sequence[type[BaseModel]]) -> None:
    components = schema.setdefault("components", {})
    components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    schema["security"] = [{"token": []}]
    schemas = components.setdefault("schemas", {})
    for model in models:
        described = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(described.pop("$defs", {}))
        schemas[model.__name__] = described
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    error_content = content_of("application/json", models[0].__name__)
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            of_path = refusals(path) if callable(refusals) else refusals
            responses = operation["responses"]
            if "HTTPValidationError" in str(responses.get("422", "")):
                del responses["422"]
            for status, description in of_path.items():
                responses.setdefault(status, {"description": description})
            for status, response in responses.items():
                if status.isdigit() and int(status) >= 400:
                    response.setdefault("content", dict(error_content))
