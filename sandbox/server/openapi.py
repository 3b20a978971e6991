"""What FastAPI leaves out of the OpenAPI schema: the token, the shape of refusals, bodies that are no JSON."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from penstock.sandbox.server.errors import ErrorBody
from penstock.sandbox.server.views import StreamedOutput, StreamEnd

REFUSALS = {
    "400": "The body cannot be read",
    "401": "No token of this server",
    "413": "The body is too long",
    "422": "The request is wrong; `field` says where",
    "503": "The sandbox failed; with Retry-After: no box was free in time, and nothing was done",
}
"""Every route's."""
BUSY = "This token has as many boxes or running calls as it may: nothing was done, see Retry-After"
OF_SESSIONS = {"404": "No such session of this token (any more)", "429": BUSY}
OF_FILES = {"409": "The file or folder could not be opened; `errno` says why"}
_BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
BYTES_IN: dict[str, Any] = {"requestBody": {"content": _BYTES, "required": True}}
BYTES_OUT: dict[int | str, dict[str, Any]] = {200: {"description": "The bytes", "content": _BYTES}}
NDJSON: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "One `StreamedOutput` per line; the last line is a `StreamEnd`.",
        "content": {"application/x-ndjson": {"schema": {"type": "string"}}},
    }
}


def complete_schema(app: FastAPI) -> None:
    made_by_fastapi = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _complete(made_by_fastapi())
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(schema: dict[str, Any]) -> None:
    components = schema.setdefault("components", {})
    components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    schema["security"] = [{"token": []}]
    schemas = components.setdefault("schemas", {})
    for model in (ErrorBody, StreamedOutput, StreamEnd):
        _add(schemas, model)
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            _complete_responses(path, operation["responses"])


def _add(schemas: dict[str, Any], model: type[BaseModel]) -> None:
    described = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(described.pop("$defs", {}))
    schemas[model.__name__] = described


def _complete_responses(path: str, responses: dict[str, Any]) -> None:
    if "HTTPValidationError" in str(responses.get("422", "")):
        del responses["422"]
    refusals = dict(REFUSALS)
    if path.startswith("/sessions"):
        refusals |= OF_SESSIONS
    if path == "/run_code":
        refusals["429"] = BUSY
    if path.endswith(("/files", "/folder")):
        refusals |= OF_FILES
    for status, description in refusals.items():
        responses.setdefault(status, {"description": description})
    for status, response in responses.items():
        if status.isdigit() and int(status) >= 400:
            reference = {"schema": {"$ref": "#/components/schemas/ErrorBody"}}
            response.setdefault("content", {"application/json": reference})
