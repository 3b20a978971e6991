"""Chat messages of a dataset's rows: prompts of tasks, with pictures or without, and conversations of `penstock sft`.

A column, the calls of a message and the arguments of a call may be JSON as text: they become objects. A Parquet file
fills keys that an object lacks with nulls, at every depth: they are left out. A null of JSON stays if it may be
meant, in the arguments of a call; elsewhere it says that a key is absent. Content whose parts are all text becomes
one text: templates of models without images drop parts, or write them as Python does.
"""

from __future__ import annotations

import json
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Mapping
from typing import Any


class BadMessages(ValueError):
    """A column of a row cannot be read; the message names the key."""


def read_messages(column: Any, where: str, *, parquet: bool) -> list[dict[str, Any]]:
    """Messages in OpenAI's form, arguments of calls as objects. Raises `BadMessages`."""
    messages = from_json_text(column, f"{where} must be a list of chat messages: its text")
    if not isinstance(messages, list) or not messages:
        raise BadMessages(f"{where} must be a list of chat messages, found {messages!r:.80}")
    filled = parquet and messages is column
    return [_message(message, f"{where}[{number}]", filled) for number, message in enumerate(messages)]


def from_json_text(value: Any, where: str) -> Any:
    """`value`, parsed if it is text. Raises `BadMessages`."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except RecursionError:
        raise BadMessages(f"{where} is nested too deeply") from None
    except ValueError as error:
        raise BadMessages(f"{where} is not valid JSON: {error}; found {value!r:.80}") from error


def text_of(line: bytes) -> str:
    """The text of a line, without a byte order mark. Raises `BadMessages` for one that is not UTF-8."""
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        place = f"{error.reason}, byte {error.start}"
        theirs = "utf-16" if line.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else "latin1"
        raise BadMessages(f"not UTF-8: {place}; convert the file, for example `iconv -f {theirs} -t utf-8`") from error


def without_nulls(value: Any) -> Any:
    """`value` without the keys whose value is null, at every depth."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _message(message: Any, where: str, filled: bool) -> dict[str, Any]:
    """`filled`: with nulls, by Parquet."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise BadMessages(f"{where} must be {{'role', 'content'}}, found {message!r:.80}")
    plain = {key: without_nulls(item) if filled else item for key, item in message.items() if item is not None}
    if "function_call" in plain:
        raise BadMessages(f"{where}.function_call is not read: write the call as tool_calls, its result with role tool")
    if calls := _calls(plain.pop("tool_calls", None), f"{where}.tool_calls"):
        plain["tool_calls"] = calls
    content = plain.get("content")
    if isinstance(content, list):
        parts = [_part(part, f"{where}.content[{number}]") for number, part in enumerate(content)]
        texts = [part["text"] for part in parts if part.get("type") == "text"]
        plain["content"] = parts if len(texts) < len(parts) else "".join(texts)
    elif content is not None and not isinstance(content, str):
        raise BadMessages(f"{where}.content must be text or a list of parts, found {content!r:.80}")
    return plain


def _part(part: Any, where: str) -> dict[str, Any]:
    """Templates take a part for an image if it has the key, whatever the value: a key without a value goes."""
    if not isinstance(part, Mapping):
        raise BadMessages(f"{where} must be {{'type', 'text'}} or the like, found {part!r:.80}")
    plain = {key: without_nulls(item) for key, item in part.items()}
    plain = {key: item for key, item in plain.items() if item is not None and item != {}}
    if not isinstance(plain.get("image", ""), str):
        raise BadMessages(f"{where}.image must be a path or a data: URL, found {plain['image']!r:.80}")
    if plain.get("type") in ("image", "image_url"):
        return plain
    if not isinstance(plain.get("text"), str):
        raise BadMessages(f"{where} must have a text or an image, found {part!r:.80}")
    return {"type": "text", "text": plain["text"]}


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    calls = from_json_text(calls or [], where)
    if not isinstance(calls, list):
        raise BadMessages(f"{where} must be a list of calls, found {calls!r:.80}")
    return [_call(call, f"{where}[{number}]") for number, call in enumerate(calls)]


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadMessages(f"{where} must be {{'function': {{'name', 'arguments'}}}}, found {call!r:.80}")
    arguments = from_json_text(function.get("arguments") or {}, f"{where}.function.arguments")
    if not isinstance(arguments, Mapping):
        raise BadMessages(f"{where}.function.arguments must be an object, found {arguments!r:.80}")
    identity = {"id": call["id"]} if call.get("id") else {}
    return {**identity, "type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}
