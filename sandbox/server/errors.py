"""Every refusal has one shape: ``{"error": {"message", "field"?, "errno"?}}``.

401 no token of ours. 404 no such session (any more). 409 a file could not be opened (`errno`). 413 body too long.
422 the request is wrong (`field`). 429 over this token's quota; 503 no free box in time, both with Retry-After and
nothing done; 503 without it: the sandbox failed.
"""

from __future__ import annotations

import math

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from penstock.sandbox.protocol import NoSuchImage, SandboxBusy, SandboxError, SandboxLost


class ErrorDetail(BaseModel):
    message: str
    field: str | None = None
    """Where in the request, as ``body.argv.0``."""
    errno: int | None = None
    """Of a file that could not be opened or written."""


class ErrorBody(BaseModel):
    error: ErrorDetail


class BadRequest(Exception):
    """The request is well formed and still wrong."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class OverQuota(SandboxBusy):
    """This token has as much as it may."""


def refusal(status: int, message: str, *, field: str | None = None, errno: int | None = None) -> JSONResponse:
    detail = ErrorDetail(message=message, field=field, errno=errno)
    return JSONResponse({"error": detail.model_dump(exclude_none=True)}, status)


def add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(SandboxError)
    async def failed(_: Request, error: SandboxError) -> JSONResponse:
        return _sandbox_refusal(error)

    @app.exception_handler(OSError)
    async def no_file(_: Request, error: OSError) -> JSONResponse:
        return refusal(409, error.strerror or str(error), errno=error.errno or 5)

    @app.exception_handler(BadRequest)
    async def bad(_: Request, error: BadRequest) -> JSONResponse:
        return refusal(422, str(error), field=error.field)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]  # its input is not told: it may be anything, NaN and half characters included
        return refusal(422, first["msg"], field=".".join(str(part) for part in first["loc"]))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        answer = refusal(error.status_code, message)
        answer.headers.update(error.headers or {})
        return answer


def _sandbox_refusal(error: SandboxError) -> JSONResponse:
    if isinstance(error, SandboxLost):
        return refusal(404, str(error))
    if isinstance(error, NoSuchImage):
        return refusal(422, str(error), field="body.image")
    answer = refusal(429 if isinstance(error, OverQuota) else 503, str(error))
    if isinstance(error, SandboxBusy):
        answer.headers["Retry-After"] = str(max(1, math.ceil(error.after_s or 1.0)))
    return answer
