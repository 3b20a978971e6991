"""Fields that several routes share, and what they mean for sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from penstock.gateway.wire.check import Wire
from penstock.gateway.wire.types import BadAsk

INT32, INT64 = 2**31 - 1, 2**63 - 1
MAX_CHOICES = 16

Count = Annotated[int, Field(ge=1, le=INT32)]
Stop = Annotated[str, Field(min_length=1)]
Name = Annotated[str, Field(min_length=1)]

HARMLESS = frozenset(
    [
        "metadata",
        "store",
        "user",
        "safety_identifier",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
    ]
)
"""Taken and dropped on every route: bookkeeping of OpenAI's, which leaves the sampled tokens alone."""
PENALTIES: dict[str, tuple[Any, ...]] = {
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
}
"""They would make the distribution that is sampled another one than the policy's."""


class StreamOptions(Wire):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Taken and dropped: no padding is ever sent."""


def _with_harmless(schema: dict[str, Any]) -> None:
    """For OpenAPI: harmless fields are taken too, whatever they hold."""
    for name in sorted(HARMLESS):
        schema["properties"].setdefault(name, {"title": name, "description": "Taken and dropped."})


class SamplingBody(Wire):
    """What every route takes."""

    model_config = ConfigDict(json_schema_extra=_with_harmless)

    model: Name
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=INT32, description="Not OpenAI's; as vLLM and SGLang take it.")
    stream: bool | None = None


class ChoicesBody(SamplingBody):
    """What chat and completions take and the Responses API does not."""

    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(None, ge=-INT64 - 1, le=INT64)
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    stream_options: StreamOptions | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """As a tuple, none as an empty one."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        """A last chunk with usage was asked for."""
        return bool(self.stream_options and self.stream_options.include_usage)


def sampling_of(body: SamplingBody, max_new_tokens: int | None) -> dict[str, Any]:
    """Fields of `Sampling` that the client set."""
    names = ("temperature", "top_p", "top_k", "seed")
    found = {name: getattr(body, name, None) for name in names} | {"max_new_tokens": max_new_tokens}
    return {name: value for name, value in found.items() if value is not None}


class Function(Wire):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Taken and dropped: nothing constrains what the model writes, arguments are checked where a tool runs."""


def tool_schema(function: Function) -> dict[str, Any]:
    """In the shape and order of `BaseTool.schema`, so that a prompt reads as it does in training."""
    described = {"description": function.description} if function.description is not None else {}
    parameters = function.parameters if function.parameters is not None else {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": function.name, **described, "parameters": parameters}}


def check_names(functions: Sequence[Function]) -> None:
    """Raises `BadAsk` where two tools have one name."""
    seen: set[str] = set()
    for i, function in enumerate(functions):
        if function.name in seen:
            raise BadAsk(f"tools.{i}", f"there are two tools called {function.name!r}", "invalid_value")
        seen.add(function.name)


ToolChoice = Annotated[Any, Field(json_schema_extra={"enum": ["auto", "none", None]})]
"""Read by `check_tool_choice`, which can say why."""


def check_tool_choice(choice: Any) -> None:
    """Raises `BadAsk` for a choice that would force the model."""
    if choice not in (None, "auto", "none"):
        raise BadAsk("tool_choice", "only 'auto' and 'none': nothing forces the model to call", "unsupported_parameter")
