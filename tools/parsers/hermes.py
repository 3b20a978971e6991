"""Hermes and Qwen: ``<tool_call>{"name": "python", "arguments": {"code": "1 + 1"}}</tool_call>``, several times."""

from __future__ import annotations

import json
import re
from typing import Any

from penstock.tools.parsers.base import ParsedTurn, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
SHAPE = 'a call is written <tool_call>{"name": ..., "arguments": {...}}</tool_call>'


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


class HermesParser:
    def parse(self, text: str) -> ParsedTurn:
        content: list[str] = []
        calls: list[ToolCall] = []
        position = 0
        while (start := text.find(OPEN, position)) >= 0:
            content.append(text[position:start])
            call, position = _read_call(text, start + len(OPEN), f"call_{len(calls)}")
            calls.append(call)
        content.append(text[position:])
        return ParsedTurn("".join(content).strip(), tuple(calls))


def _read_call(text: str, start: int, call_id: str) -> tuple[ToolCall, int]:
    """The call whose body begins at `start`, and where the text goes on behind it."""
    try:
        value, end = _DECODER.raw_decode(text, _skip_space(text, start))
    except (ValueError, RecursionError) as error:
        return _malformed(text, start, call_id, f"no valid JSON ({_reason(error)}); {SHAPE}")
    closing = _skip_space(text, end)
    if not text.startswith(CLOSE, closing):
        found = "text follows the JSON" if text[closing:] else f"{CLOSE} is missing"
        return _malformed(text, start, call_id, f"{found}; {SHAPE}")
    return _to_call(value, call_id), closing + len(CLOSE)


def _skip_space(text: str, start: int) -> int:
    match = _SPACE.match(text, start)
    return match.end() if match else start


def _malformed(text: str, start: int, call_id: str, error: str) -> tuple[ToolCall, int]:
    """Goes on behind the next closing tag, or else with the next call."""
    close, following = text.find(CLOSE, start), text.find(OPEN, start)
    if close >= 0 and (following < 0 or close < following):
        end = close + len(CLOSE)
    else:
        end = following if following >= 0 else len(text)
    return ToolCall("", call_id=call_id, error=f"malformed tool call: {error}"), end


def _to_call(value: Any, call_id: str) -> ToolCall:
    problem = _problem_with(value)
    if problem is None:
        return ToolCall(value["name"], value["arguments"], call_id)
    name = value.get("name") if isinstance(value, dict) else None
    known = name if isinstance(name, str) and name.isascii() else ""
    return ToolCall(known, call_id=call_id, error=f"malformed tool call: {problem}; {SHAPE}")


def _problem_with(value: Any) -> str | None:
    if not isinstance(value, dict):
        return "it must be a JSON object"
    if not isinstance(value.get("name"), str) or not value["name"]:
        return '"name" must be a text'
    if not isinstance(value.get("arguments"), dict):
        return '"arguments" must be a JSON object'
    if extra := sorted(set(value) - {"name", "arguments"}):
        return f"{extra[0]!r} has no meaning here"
    return _unusable(value)


def _unusable(value: Any) -> str | None:
    """JSON can escape half of a surrogate pair, which no file or tokenizer takes, and write numbers without end."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except UnicodeEncodeError:
        return "it holds characters that are no Unicode text"
    except (ValueError, RecursionError):
        return "it holds a number that is too large"
    return None


def _reason(error: BaseException) -> str:
    if isinstance(error, json.JSONDecodeError):
        return error.msg
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)[:80]
