"""Validation of JSON bodies: each field is used, ignored because it is harmless, or refused by name.

used       the pydantic model of the route; null is the same as absent
harmless   the API's fields that cannot change the sampled tokens: ignored
refused    the API's fields that would, or that ask for what an answer cannot hold, unless they hold a neutral value
unknown    everything else: refused
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from penstock.common import nearest
from penstock.gateway.wire.types import InvalidRequest

Body = TypeVar("Body", bound=BaseModel)
MAX_DEPTH = 64
"""Largest depth of nested JSON. Templates and schema checks recurse into their input."""


class WireModel(BaseModel):
    """Base of request models: no unknown fields, no type conversion, null as absent."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {name: one for name, one in value.items() if one is not None} if isinstance(value, dict) else value


@dataclass(frozen=True, slots=True)
class UnsupportedField:
    """A field of the API's that is not supported."""

    reason: str
    """Reason of the error: "is not supported here: …"."""
    neutral: tuple[Any, ...] = ()
    """Values that ask for nothing, and are accepted."""


@dataclass(frozen=True, slots=True)
class BodyFields(Generic[Body]):
    """The fields of one route."""

    body: type[Body]
    harmless: frozenset[str]
    refused: Mapping[str, UnsupportedField]

    def read(self, body: Any) -> Body:
        """Raises `InvalidRequest` naming the field."""
        if not isinstance(body, dict):
            raise InvalidRequest("", "the body must be a JSON object")
        check_plain(body)
        known = {*self.body.model_fields, *self.harmless, *self.refused}
        for name, value in body.items():
            if name not in known:
                raise InvalidRequest(path_text([name]), f"unknown field{nearest(name, known)}", "unknown_parameter")
            refused = self.refused.get(name)
            # False is not 0 here.
            if refused is not None and not any(
                value == one and isinstance(value, bool) == isinstance(one, bool) for one in (None, *refused.neutral)
            ):
                raise InvalidRequest(name, f"is not supported here: {refused.reason}", "unsupported_parameter")
        return validated(self.body, {name: body[name] for name in self.body.model_fields if name in body})


def validated(model: type[Body], value: Any) -> Body:
    """`value` as a `model`. Raises `InvalidRequest` with the path of the wrong field."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        # Of several errors (the arms of a union) the deepest one, preferring a wrong `type`, which explains others, and
        # then the arm whose type is the value's own.
        errors = [(_path_in(value, one["loc"]), one) for one in error.errors(include_url=False, include_input=False)]
        path, one = max(
            errors,
            key=lambda pair: (len(pair[0]), pair[0][-1:] == ("type",), not pair[1]["type"].endswith("_type")),
        )
        field = path_text(path)
        if one["type"] == "extra_forbidden":
            raise InvalidRequest(field, "unknown field", "unknown_parameter") from None
        message = one["msg"].removeprefix("Value error, ").replace(" after validation", "")
        raise InvalidRequest(field, message, "invalid_value") from None
    except RecursionError:
        raise InvalidRequest("", "nested too deeply", "invalid_value") from None


def check_plain(value: Any, where: tuple[str | int, ...] = ()) -> None:
    """Refuses what tokenizers or JSON cannot represent: half surrogate pairs, NaN, too deep nesting."""
    if len(where) > MAX_DEPTH:
        raise InvalidRequest(path_text(where[:3]), "nested too deeply", "invalid_value")
    if isinstance(value, str) and not is_text(value):
        raise InvalidRequest(path_text(where), "holds characters that are no Unicode text", "invalid_value")
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(path_text(where), "must be a finite number", "invalid_value")
    if isinstance(value, Mapping):
        inside: Iterable[tuple[str | int, Any]] = value.items()
    else:
        inside = enumerate(value) if isinstance(value, list) else ()
    for key, one in inside:
        check_plain(key if isinstance(key, str) else None, (*where, key))
        check_plain(one, (*where, key))


def is_text(value: str) -> bool:
    """Return True if `value` can be encoded as UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def path_text(where: Sequence[str | int]) -> str:
    """``messages.0.content``; always text that JSON can carry, never empty for a field."""
    return ".".join(str(part).encode(errors="backslashreplace").decode() or '""' for part in where)


def _path_in(value: Any, location: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """`location` without pydantic's names for the arms of unions."""
    path: list[str | int] = []
    for i, part in enumerate(location):
        if _names_an_arm(value, *location[i : i + 2]):
            continue
        if isinstance(value, Mapping) and (part in value or i == len(location) - 1):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            continue
        path.append(part)
    return tuple(path)


def _names_an_arm(value: Any, part: str | int, following: str | int | None = None) -> bool:
    """Return True if `part` is the type of `value`, not its field of that name (``{"type": "text", "text": …}``)."""
    if not isinstance(value, Mapping) or part not in (value.get("type"), value.get("role")) or following not in value:
        return False
    field = value.get(part)
    return not (isinstance(field, Mapping) and following in field)


INT32, INT64 = 2**31 - 1, 2**63 - 1
Count = Annotated[int, Field(ge=1, le=INT32)]
Stop = Annotated[str, Field(min_length=1)]
Name = Annotated[str, Field(min_length=1)]
HARMLESS = frozenset(
    [
        *("metadata", "store", "user", "safety_identifier", "service_tier"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    ]
)
"""Ignored on every route: OpenAI's bookkeeping, which does not change the sampled tokens."""
OTHER_DISTRIBUTION = "tokens would be sampled from another distribution than the policy's"
UNCONSTRAINED = "sampling is not constrained to a format; ask for it in the prompt and check the answer"
ONE_LOGPROB = "engines report the sampled token's log-probability alone"
TEXT_ONLY = "answers are text"
NOT_THE_MODELS = "the served model has no such setting"
NOT_HERE = "this is a service of OpenAI's"
PENALTIES: dict[str, UnsupportedField] = {
    "logit_bias": UnsupportedField(OTHER_DISTRIBUTION, ({},)),
    "presence_penalty": UnsupportedField(OTHER_DISTRIBUTION, (0,)),
    "frequency_penalty": UnsupportedField(OTHER_DISTRIBUTION, (0,)),
    "repetition_penalty": UnsupportedField(OTHER_DISTRIBUTION, (1,)),
    "min_p": UnsupportedField(f"{OTHER_DISTRIBUTION}; temperature, top_p and top_k are supported", (0,)),
}
"""OpenAI's, and those that clients of vLLM and SGLang send in addition to them."""


class StreamOptions(WireModel):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Ignored: no padding is ever sent."""


def ignored_fields(names: Iterable[str]) -> Callable[[dict[str, Any]], None]:
    """Return a schema change for OpenAPI: these fields are accepted with any value."""

    def add(schema: dict[str, Any]) -> None:
        for name in sorted(names):
            schema["properties"].setdefault(name, {"title": name, "description": "Ignored."})

    return add


class SamplingBody(WireModel):
    """Fields of every route."""

    model_config = ConfigDict(json_schema_extra=ignored_fields(HARMLESS))

    model: Name
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=INT32, description="Not OpenAI's; as vLLM and SGLang take it.")
    stream: bool | None = None


class ChoicesBody(SamplingBody):
    """Fields of chat and completions, not of the Responses API."""

    n: int | None = Field(None, ge=1, le=16)
    seed: int | None = Field(None, ge=-INT64 - 1, le=INT64)
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    stream_options: StreamOptions | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        """True if a last chunk with usage was requested."""
        return bool(self.stream_options and self.stream_options.include_usage)


def sampling_of(body: SamplingBody, max_new_tokens: int | None) -> dict[str, Any]:
    """Fields of `Sampling` that the client set."""
    names = ("temperature", "top_p", "top_k", "seed")
    settings = {name: getattr(body, name, None) for name in names} | {"max_new_tokens": max_new_tokens}
    return {name: value for name, value in settings.items() if value is not None}


ToolName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,128}$")]


class Function(WireModel):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Ignored: sampling is not constrained; arguments are validated where a tool runs."""


def tool_schema(function: Function) -> dict[str, Any]:
    """Return a tool in the shape and key order of `BaseTool.schema`, so that prompts are the same as in training."""
    described = {"description": function.description} if function.description is not None else {}
    parameters = function.parameters if function.parameters is not None else {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": function.name, **described, "parameters": parameters}}


def check_names(functions: Sequence[Function]) -> None:
    """Raises `InvalidRequest` where two tools have one name."""
    seen: set[str] = set()
    for i, function in enumerate(functions):
        if function.name in seen:
            raise InvalidRequest(f"tools.{i}", f"there are two tools called {function.name!r}", "invalid_value")
        seen.add(function.name)


ToolChoice = Annotated[Any, Field(json_schema_extra={"enum": ["auto", "none", None]})]
"""Validated by `check_tool_choice`, whose message has the cause."""


def check_tool_choice(choice: Any) -> None:
    """Raises `InvalidRequest` for a choice that would force the model."""
    if choice not in (None, "auto", "none"):
        name = repr(choice) if isinstance(choice, str) else "a named tool"
        raise InvalidRequest(
            "tool_choice",
            f"{name} is not supported here: sampling is not constrained, so no call can be forced; "
            "use 'auto' or 'none', and ask for the call in the prompt",
            "unsupported_parameter",
        )


class TextContent(WireModel):
    """A text among the parts of a message's content, in one route's format."""

    text: str


def plain_content(content: str | Sequence[WireModel] | None, where: str, first: int = 0) -> str:
    """Joins text parts without a separator.

    Raises `InvalidRequest` at `where` for an image; `first`: number of the first part there.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for number, part in enumerate(content, start=first):
        if not isinstance(part, TextContent):
            raise InvalidRequest(f"{where}.{number}", "this model takes no images", "unsupported_parameter")
        texts.append(part.text)
    return "".join(texts)
