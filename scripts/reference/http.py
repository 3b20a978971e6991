"""docs/reference/http.md: routes, bodies and answers of every server, from their OpenAPI schemas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from scripts.reference.schema_text import describe, resolve, type_text
from scripts.reference.servers import SERVERS, Server

HEADER = """# HTTP

Every route needs `Authorization: Bearer TOKEN`, but for the dashboard's own files. Rollout and sandbox servers answer
`GET /openapi.json` with the whole schema.
"""
Schema = Mapping[str, Any]


def render() -> str:
    lines = [HEADER]
    for server in SERVERS:
        lines += _server(server)
    return "\n".join(lines).rstrip() + "\n"


def _server(server: Server) -> Iterator[str]:
    schema = server.make().openapi()
    shapes: Schema = schema.get("components", {}).get("schemas", {})
    yield f"## {server.title}\n"
    yield f"{server.about}\n"
    shown: set[str] = set()
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            yield from _operation(method.upper(), path, operation, shapes, shown)


def _operation(method: str, path: str, operation: Schema, shapes: Schema, shown: set[str]) -> Iterator[str]:
    """`shown`: names of shapes whose fields stand above already; those of this operation are added."""
    yield f"### {method} {path}\n"
    if description := operation.get("description", ""):
        yield f"{description}\n"
    body = _content(operation.get("requestBody", {}))
    rows = [_parameter(one) for one in operation.get("parameters", ())]
    rows += [describe(f"body: {name}", field, needed) for name, field, needed in _fields(body, shapes)]
    if rows:
        yield "| | type | default | |\n| --- | --- | --- | --- |"
        yield from rows
        yield ""
    yield from _answers(operation)
    shown.update(_named({"$ref": body["$ref"]} if "$ref" in body else {}))
    for part in (resolve(body, shapes).get("properties", {}), *map(_content, operation["responses"].values())):
        yield from _shapes(part, shapes, shown)


def _parameter(one: Schema) -> str:
    field = {**one["schema"], "description": one.get("description", one["schema"].get("description", ""))}
    return describe(f"{one['in']}: {one['name']}", field, one.get("required", False))


def _content(holder: Schema) -> Schema:
    """The schema of a body or an answer; empty where there is none."""
    for media in holder.get("content", {}).values():
        return dict(media.get("schema", {}))
    return {}


def _fields(schema: Schema, shapes: Schema) -> Iterator[tuple[str, Schema, bool]]:
    found = resolve(schema, shapes)
    needed = found.get("required", ())
    for name, field in found.get("properties", {}).items():
        yield name, field, name in needed


def _answers(operation: Schema) -> Iterator[str]:
    for status, answer in operation["responses"].items():
        if "HTTPValidationError" in str(answer):  # FastAPI's own shape, which its next release may change
            yield f"- **{status}** the request is wrong"
            continue
        text = type_text(_content(answer))
        description = answer.get("description", "")
        meaning = "" if description == "Successful Response" else description
        said = [part for part in (f"`{text}`" if text else "", meaning) if part]
        yield f"- **{status}** {': '.join(said) or 'done'}"
    yield ""


def _shapes(schema: Schema, shapes: Schema, shown: set[str]) -> Iterator[str]:
    """Tables of the named shapes that a body or an answer is made of, each once per server."""
    for name in _named(schema):
        if name in shown or name not in shapes or name == "HTTPValidationError":
            continue
        shown.add(name)
        rows = [describe(field, value, needed) for field, value, needed in _fields(shapes[name], shapes)]
        if rows:
            yield f"`{name}`\n"
            yield "| field | type | default | |\n| --- | --- | --- | --- |"
            yield from rows
            yield ""
        yield from _shapes(shapes[name].get("properties", {}), shapes, shown)


def _named(schema: Any) -> Iterator[str]:
    """Names of all shapes that a schema refers to, in order."""
    if isinstance(schema, Mapping):
        if "$ref" in schema:
            yield str(schema["$ref"]).rpartition("/")[2]
        for value in schema.values():
            yield from _named(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _named(value)
