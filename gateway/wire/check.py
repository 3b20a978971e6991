"""A JSON body against what a route takes: every field is used, known to be harmless, or refused by name.

used       the pydantic model of the route; null is the same as absent
harmless   fields of OpenAI's that cannot change the sampled tokens: taken and dropped
refused    fields of OpenAI's that would, unless they hold a neutral value
unknown    everything else
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

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


def nearest(name: str, known: set[str]) -> str:
    """``; did you mean 'top_p'?`` or nothing."""
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


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
