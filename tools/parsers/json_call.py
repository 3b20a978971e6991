"""JSON as models write it: read strictly, and refused if it is unusable."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.tools.parsers.turn import Malformed, NamedCall, TurnBuilder, skip_space

MAX_DEPTH = 64
"""Levels of nesting. What checks and writes arguments later recurses, on a deeper stack than this."""


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuses duplicate keys: which value was meant is unknown."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("an object has the same key twice")
    return values


DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_unique)


def read_json(text: str, start: int) -> tuple[Any, int]:
    """(value, its end); space before it is skipped. Raises `Malformed`."""
    try:
        value, end = DECODER.raw_decode(text, skip_space(text, start))
    except (ValueError, RecursionError) as error:
        raise Malformed(f"no valid JSON ({_reason(error)})") from error
    return value, end


def json_of(text: str, promise: str) -> Any:
    """The JSON value that `text` is, as `promise` says. Raises `Malformed`."""
    try:
        return DECODER.decode(text.strip())
    except (ValueError, RecursionError) as error:
        raise Malformed(f"{text[:80]!r} is not JSON, which {promise} promises") from error


def read_arguments(text: str, start: int, name: str) -> tuple[dict[str, Any], int]:
    """A JSON object that can be used as arguments of `name`, and its end. Raises `Malformed`."""
    value, end = read_json(text, start)
    problem = "the arguments must be a JSON object" if not isinstance(value, dict) else unusable([name, value])
    if problem:
        raise Malformed(problem)
    return value, end


def add_call(turn: TurnBuilder, value: Any, arguments_key: str = "arguments", also: Sequence[str] = ()) -> None:
    """Adds the call that the JSON object `value` is: a name, arguments and, optionally, the keys in `also`."""
    problem = _problem_with(value, ("name", arguments_key), also)
    if problem is None:
        turn.call(value["name"], value[arguments_key], id_of(value))
        return
    name = value.get("name") if isinstance(value, dict) else None
    turn.malformed(problem, name if isinstance(name, str) else "")


def id_of(value: Mapping[str, Any]) -> str:
    """The id that a call was written with; empty if it has none, or one that no template could take."""
    written = value.get("id")
    # Results are written next to the id: it must not be able to spell a special token, nor be a number, which counts
    # calls (`ToolCall.written_id`).
    return written if isinstance(written, str) and re.fullmatch(r"(?![0-9]{1,3}\Z)[\w.:\-]{1,64}", written) else ""


def arguments_key(value: Any, usual: str, other: str) -> str:
    """Return the key of the arguments: `usual`, or `other` for models that were tuned on other data."""
    return other if isinstance(value, dict) and other in value and usual not in value else usual


def read_call_list(text: str, start: int, keys: tuple[str, str] = ("name", "arguments")) -> tuple[list[NamedCall], int]:
    """The calls of a JSON list of objects with these `keys`, and its end. Raises `Malformed`."""
    values, end = read_json(text, start)
    return named_calls(values, keys), end


def named_calls(
    values: Any, keys: tuple[str, str] = ("name", "arguments"), also: Sequence[str] = ()
) -> list[NamedCall]:
    """The calls that the JSON list `values` is: `keys` of a name and its arguments, and optionally those in `also`.

    Raises `Malformed`.
    """
    if not isinstance(values, list) or not values:
        raise Malformed("the list of calls is empty" if values == [] else "calls are written as a JSON list")
    for value in values:
        if problem := _problem_with(value, keys, also):
            raise Malformed(problem)
    return [(value[keys[0]], value[keys[1]]) for value in values]


def unusable(value: Any) -> str | None:
    """Return what is wrong with a value; None if nothing is. JSON can escape half of a surrogate pair, which no file or
    tokenizer takes, and write numbers without end.
    """
    level = [value]
    for _ in range(MAX_DEPTH + 2):
        level = [inner for outer in level for inner in _inside(outer)]
    if level:
        return f"it is nested more than {MAX_DEPTH} levels deep"
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except UnicodeEncodeError:
        return "it holds characters that are no Unicode text"
    except ValueError:
        return "it holds a number that is too large"
    return None


def _problem_with(value: Any, keys: tuple[str, str], also: Sequence[str]) -> str | None:
    name_key, arguments_key = keys
    if not isinstance(value, dict):
        return "it must be a JSON object"
    if not isinstance(value.get(name_key), str) or not value[name_key]:
        return f'"{name_key}" must be a text'
    if not isinstance(value.get(arguments_key), dict):
        return f'"{arguments_key}" must be a JSON object'
    if extra := sorted(set(value) - {*keys, *also}):
        return f"{extra[0]!r} has no meaning here"
    return unusable(value)


def _inside(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else ()


def _reason(error: BaseException) -> str:
    if isinstance(error, json.JSONDecodeError):
        return error.msg
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)[:80]
