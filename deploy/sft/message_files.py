"""Files of conversations: JSONL or Parquet with a column `messages`, and `tools` where a row has its own.

Both columns may be JSON as text. Arguments of calls may be objects or, as in OpenAI's form, JSON as text. A Parquet
file fills keys that a message lacks with nulls: they are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.agent_loops import BadDemonstration
from penstock.deploy.config import ConfigError

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class MessageRow:
    """One conversation of a file."""

    where: str
    """File and line (JSONL) or row (Parquet), from 1."""
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    """None: the row names none."""


def read_rows(path: Path) -> Iterator[MessageRow | BadDemonstration]:
    """Rows in order; for one that is no conversation, the error that names it. Raises `ConfigError` for the file."""
    if not path.is_file():
        raise ConfigError(f"sft: {path}: no such file; relative paths are searched from the current directory")
    readers = {".parquet": _parquet, ".jsonl": _json_lines, ".ndjson": _json_lines}
    if path.suffix not in readers:
        raise ConfigError(
            f"sft: {path}: unknown kind {path.suffix!r}; give a .jsonl or .parquet file, or a run to sft.runs"
        )
    for where, raw in readers[path.suffix](path):
        try:
            # A line of JSON is parsed here, where what is wrong with it gets its place.
            row = _from_text(raw, "the line")
            yield MessageRow(where, _messages(row), _tools(row))
        except BadDemonstration as error:
            yield BadDemonstration(f"{where}: {error}")


def _json_lines(path: Path) -> Iterator[tuple[str, str]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            yield f"{path}, line {number}", line


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        file, number = pyarrow.parquet.ParquetFile(path), 0
        for batch in file.iter_batches(batch_size=256):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"sft: {path} is not readable as Parquet: {error}") from error


def _messages(raw: Any) -> list[dict[str, Any]]:
    if not isinstance(raw, Mapping):
        raise BadDemonstration(f"expected an object, found {type(raw).__name__}")
    if "messages" not in raw:
        raise BadDemonstration(f"column 'messages' is missing; found {', '.join(sorted(raw)) or 'none'}")
    found = _from_text(raw["messages"], "messages")
    if not isinstance(found, list) or not found:
        raise BadDemonstration(f"messages must be a list of chat messages, found {found!r:.80}")
    return [_message(message, number) for number, message in enumerate(found)]


def _message(message: Any, number: int) -> dict[str, Any]:
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        raise BadDemonstration(f"messages[{number}] needs a role of {', '.join(ROLES)}; found {message!r:.80}")
    known = {key: value for key, value in message.items() if value is not None}
    calls = known.pop("tool_calls", None) or []
    if calls:
        known["tool_calls"] = [_call(call, f"messages[{number}].tool_calls[{at}]") for at, call in enumerate(calls)]
    content = known.setdefault("content", "")
    if not isinstance(content, str | list):
        raise BadDemonstration(f"messages[{number}].content must be text, found {content!r:.80}")
    if not content and known["role"] == "assistant" and not calls:
        raise BadDemonstration(f"messages[{number}]: the model's message has neither text nor a call")
    return known


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadDemonstration(f"{where} must be {{'function': {{'name', 'arguments'}}}}, found {call!r:.80}")
    arguments = _from_text(function.get("arguments") or {}, f"{where}.function.arguments")
    if not isinstance(arguments, Mapping):
        raise BadDemonstration(f"{where}.function.arguments must be an object, found {arguments!r:.80}")
    kept = {key: value for key, value in arguments.items() if value is not None}
    named = {key: call[key] for key in ("id",) if call.get(key)}
    return {**named, "type": "function", "function": {"name": function["name"], "arguments": kept}}


def _tools(raw: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    if raw.get("tools") is None:
        return None
    found = _from_text(raw["tools"], "tools")
    if not isinstance(found, list):
        raise BadDemonstration(f"tools must be a list, found {found!r:.80}")
    for number, tool in enumerate(found):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not function.get("name"):
            raise BadDemonstration(f"tools[{number}] must be {{'type', 'function': {{'name', …}}}}, found {tool!r:.80}")
    return [_without_nulls(tool) for tool in found]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _from_text(value: Any, where: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise BadDemonstration(f"{where} is not valid JSON: {error}") from error
