"""docs/reference/configuration.md, generated from the configuration tree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from penstock.deploy.config import RunConfig

HEADER = """# Configuration

A recipe is a YAML file of this tree, or a Python file with `SETTINGS`;
`section.key=value` on the command line overrides it;
`penstock run RECIPE --dry-run` prints the resolved tree and what its knobs mean together,
and fails where a start would be refused.
Unknown keys are errors that name the nearest valid one.
"""


def render_configuration() -> str:
    return "\n".join([HEADER, *_section("", RunConfig), ""])


def _section(prefix: str, model: type[BaseModel]) -> Iterator[str]:
    nested: list[tuple[str, type[BaseModel]]] = []
    yield f"## {prefix or 'top level'}\n"
    yield "| key | default | what it does |\n| --- | --- | --- |"
    for name, field in model.model_fields.items():
        dotted = f"{prefix}.{name}" if prefix else name
        inner = section_of(field.annotation)
        if inner is not None:
            nested.append((dotted + ("[]" if inner is not field.annotation else ""), inner))
        if inner is None or inner is not field.annotation:
            yield f"| `{dotted}` | {_default(field)} | {field.description or ''} |"
    yield ""
    for dotted, inner in nested:
        yield from _section(dotted, inner)


def _default(field: Any) -> str:
    if field.default is PydanticUndefined:
        return "*needed*" if field.default_factory is None else f"`{field.default_factory()}`"
    return f"`{field.default!r}`".replace("|", "\\|")


def section_of(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None
