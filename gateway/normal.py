"""What makes two messages the same: for comparison only, never for rendering.

A client sends back what it was given, but not in the same letters: it adds keys (`refusal`, `annotations`, `audio`),
writes null for what was left out, serialises arguments anew, or puts text into parts. None of this is another history.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

Message = Mapping[str, Any]
ROLES = {"developer": "system"}


def digest(text: str) -> str:
    """Names a text; 128 bits."""
    return xxhash.xxh3_128_hexdigest(text.encode())


def as_json(value: Any) -> str:
    """One spelling per value."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def first_key(tools: Sequence[Mapping[str, Any]]) -> str:
    """Of a conversation in which nothing was said yet; other tools are another conversation."""
    return digest(as_json(list(tools)))


def next_key(key: str, message: Message) -> str:
    """Of the conversation `key` with one message more."""
    return digest(f"{key} {as_json(normal(message))}")


def normal(message: Message) -> list[Any]:
    """[role, text, further parts, calls, tool_call_id, name] with everything left out that says nothing."""
    role = ROLES.get(str(message.get("role")), message.get("role"))
    text, parts = _text_of(message.get("content"))
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    if role == "assistant":
        return [role, text.strip(), parts, calls]
    return [role, text, parts, calls, message.get("tool_call_id") or "", message.get("name") or ""]


def _text_of(content: Any) -> tuple[str, list[Any]]:
    """Texts of all parts in order, and the parts that are no text."""
    if content is None or isinstance(content, str):
        return content or "", []
    if not isinstance(content, Sequence):
        return "", [content]
    texts = [part for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    return "".join(part["text"] for part in texts), [part for part in content if part not in texts]


def _call(call: Mapping[str, Any]) -> list[Any]:
    function = call.get("function") or call
    return [call.get("id") or "", function.get("name"), _arguments(function.get("arguments"))]


def _arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments if arguments is not None else {}
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments
