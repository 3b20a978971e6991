"""Files of conversations: JSONL or Parquet with a column `messages`, and `tools` where a row has its own.

Both columns may be JSON as text; messages are read as those of tasks are (`penstock.trainer.read_messages`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.agent_loops import BadDemonstration
from penstock.common.parquet import BadParquet, parquet_rows
from penstock.common.registry import near_and_known
from penstock.deploy.recipe_tree import ConfigError
from penstock.tools import check_arguments, check_schema
from penstock.trainer import BadMessages, from_json_text, read_messages, text_of, without_nulls

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
    """Rows in order; for one that is not a conversation, the error that names it. Raises `ConfigError` for the file."""
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
            row = from_json_text(text_of(raw) if isinstance(raw, bytes) else raw, "the line")
            parquet = path.suffix == ".parquet"
            messages, tools = _messages(row, parquet), _tools(row, parquet)
            _check_texts("messages", messages)
            _check_texts("tools", tools or [])
            yield MessageRow(where, messages, tools)
        except (BadDemonstration, BadMessages) as error:
            yield BadDemonstration(f"{where}: {error}")


def _json_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield f"{path}, line {number}", line
    except OSError as error:
        raise ConfigError(f"sft: {path} cannot be read: {error.strerror}") from error


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        for number, row in enumerate(parquet_rows(path, batch_size=256), start=1):
            yield f"{path}, row {number}", row
    except BadParquet as error:
        raise ConfigError(f"sft: {error}") from error


def _messages(raw: Any, parquet: bool) -> list[dict[str, Any]]:
    if not isinstance(raw, Mapping):
        raise BadDemonstration(f"expected an object, found {type(raw).__name__}")
    if "messages" not in raw:
        raise BadDemonstration(f"column 'messages' is missing; found {', '.join(sorted(raw)) or 'none'}")
    messages = read_messages(raw["messages"], "messages", parquet=parquet)
    for number, message in enumerate(messages):
        if message["role"] not in ROLES:
            raise BadDemonstration(f"messages[{number}] needs a role of {', '.join(ROLES)}; found {message!r:.80}")
        content = message.setdefault("content", "")
        if not content and message["role"] == "assistant" and "tool_calls" not in message:
            raise BadDemonstration(f"messages[{number}]: the model's message has neither text nor a call")
    return messages


def _tools(raw: Mapping[str, Any], parquet: bool) -> list[Mapping[str, Any]] | None:
    if raw.get("tools") is None:
        return None
    tools = from_json_text(raw["tools"], "tools")
    if not isinstance(tools, list):
        raise BadDemonstration(f"tools must be a list, found {tools!r:.80}")
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not (isinstance(function.get("name"), str) and function["name"]):
            raise BadDemonstration(f"tools[{number}] must be {{'type', 'function': {{'name', …}}}}, found {tool!r:.80}")
    if parquet and tools is raw["tools"]:
        return list(without_nulls(tools))
    # A null within the parameters is JSON's own: a default, a constant.
    return [_present({**tool, "function": _present(tool["function"])}) for tool in tools]


def parameters_of(tools: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Name of each tool → the schema of its arguments; one that takes all, for a schema that cannot be checked."""
    schemas: dict[str, Mapping[str, Any]] = {}
    for function in (tool["function"] for tool in tools):
        name, schema = function["name"], function.get("parameters")
        try:
            check_schema(name, schema if isinstance(schema, Mapping) else {})
            schemas[name] = schema
        except ValueError:
            schemas[name] = {"additionalProperties": True}
    return schemas


def check_calls(messages: Iterable[Mapping[str, Any]], tools: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises `BadDemonstration` for a call that would be answered with an error: the model would learn it."""
    for number, message in enumerate(messages):
        for call in message.get("tool_calls") or ():
            name, arguments = call["function"]["name"], call["function"].get("arguments") or {}
            if name not in tools:
                raise BadDemonstration(f"messages[{number}] calls {name!r}, no tool; {near_and_known(name, tools)}")
            if problem := check_arguments(tools[name], arguments):
                raise BadDemonstration(f"messages[{number}], call of {name}: {problem}")


def _check_texts(column: str, items: Sequence[Any]) -> None:
    """Raises `BadDemonstration` for what no tokenizer and no template takes."""
    for number, item in enumerate(items):
        try:
            json.dumps(item, ensure_ascii=False).encode()
        except (UnicodeEncodeError, RecursionError) as error:
            raise BadDemonstration(f"{column}[{number}] cannot be encoded: {error}") from None


def _present(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if item is not None}
