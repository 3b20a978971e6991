"""A JSON body against what a route takes: every field is used, known to be harmless, or refused by name.

used       the pydantic model of the route; null is the same as absent
harmless   fields of OpenAI's that cannot change the sampled tokens: taken and dropped
refused    fields of OpenAI's that would, unless they hold a neutral value
unknown    everything else

Fields that several routes share, and what they mean for sampling.

Content of a message, as text or in parts, whichever route it came by.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from penstock.common import nearest
from penstock.gateway.wire.types import BadAsk

Body = TypeVar("Body", bound=BaseModel)
MAX_DEPTH = 64
"""Of nested JSON. Templates and schema checks call themselves on what they are given."""


class Wire(BaseModel):
    """Base of what clients send: nothing unknown, no value changed into another type, null as if it were absent."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return {name: one for name, one in given.items() if one is not None} if isinstance(given, dict) else given


@dataclass(frozen=True, slots=True)
class Fields(Generic[Body]):
    """What one route takes."""

    body: type[Body]
    harmless: frozenset[str]
    refused: Mapping[str, tuple[Any, ...]]
    """Name → values at which the field changes nothing."""

    def read(self, given: Any) -> Body:
        """Raises `BadAsk` naming the field."""
        if not isinstance(given, dict):
            raise BadAsk("", "the body must be a JSON object")
        check_plain(given)
        known = {*self.body.model_fields, *self.harmless, *self.refused}
        for name, value in given.items():
            self._check_name(name, value, known)
        return validated(self.body, {name: given[name] for name in self.body.model_fields if name in given})

    def _check_name(self, name: str, value: Any, known: set[str]) -> None:
        if name not in known:
            raise BadAsk(path_text([name]), f"unknown field{nearest(name, known)}", "unknown_parameter")
        if name in self.refused and not _is_one_of(value, (None, *self.refused[name])):
            raise BadAsk(name, "is not supported here: it would change what is sampled", "unsupported_parameter")


def validated(model: type[Body], given: Any, where: Sequence[str | int] = ()) -> Body:
    """`given` as a `model`. Raises `BadAsk` with the path of the field that is wrong."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise _bad_ask(error, given, where) from None
    except RecursionError:
        raise BadAsk(path_text(where), "nested too deeply", "invalid_value") from None


def check_plain(value: Any, where: tuple[str | int, ...] = ()) -> None:
    """Refuse what no tokenizer or JSON takes: half surrogate pairs, NaN, bottomless nesting."""
    if len(where) > MAX_DEPTH:
        raise BadAsk(path_text(where[:3]), "nested too deeply", "invalid_value")
    if isinstance(value, str) and not is_text(value):
        raise BadAsk(path_text(where), "holds characters that are no Unicode text", "invalid_value")
    if isinstance(value, float) and not math.isfinite(value):
        raise BadAsk(path_text(where), "must be a finite number", "invalid_value")
    for key, one in _inside(value):
        check_plain(key if isinstance(key, str) else None, (*where, key))
        check_plain(one, (*where, key))


def is_text(value: str) -> bool:
    """Whether `value` can be written as UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def path_text(where: Sequence[str | int]) -> str:
    """``messages.0.content``; always text that JSON can carry, never empty for a field."""
    return ".".join(str(part).encode(errors="backslashreplace").decode() or '""' for part in where)


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    """False is not 0 here."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def _inside(value: Any) -> list[tuple[str | int, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list) else []


def _bad_ask(error: ValidationError, given: Any, where: Sequence[str | int]) -> BadAsk:
    """Of several errors (the arms of a union) the one that lies deepest says most; a wrong `type` explains others."""
    found = [(_path_in(given, one["loc"]), one) for one in error.errors(include_url=False, include_input=False)]
    path, one = max(found, key=lambda pair: (len(pair[0]), pair[0][-1:] == ("type",)))
    if one["type"] == "extra_forbidden":
        return BadAsk(path_text([*where, *path]), "unknown field", "unknown_parameter")
    return BadAsk(path_text([*where, *path]), one["msg"].removeprefix("Value error, "), "invalid_value")


def _path_in(given: Any, location: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """`location` without the names that pydantic gives to arms of unions."""
    path: list[str | int] = []
    for i, part in enumerate(location):
        if isinstance(given, Mapping) and (part in given or i == len(location) - 1):
            given = given.get(part)
        elif isinstance(given, list) and isinstance(part, int) and part < len(given):
            given = given[part]
        else:
            continue
        path.append(part)
    return tuple(path)


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


class ContentPart(Wire):
    """A part as a route spells it."""

    @property
    @abstractmethod
    def plain(self) -> dict[str, str]:
        """As a chat template takes it: `text_part` or `image_part`."""


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def image_part(url: str) -> dict[str, str]:
    return {"type": "image", "url": url}


def plain_content(content: str | Sequence[ContentPart] | None, where: str, images: bool) -> Any:
    """Text parts are joined with nothing between them; with images the parts stay apart.

    Raises `BadAsk` at `where` for an image where the model takes none.
    """
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part.plain for part in content]
    seen = [i for i, part in enumerate(parts) if part["type"] == "image"]
    if seen and not images:
        raise BadAsk(f"{where}.{seen[0]}", "this model takes no images", "unsupported_parameter")
    return parts if seen else "".join(part["text"] for part in parts)
