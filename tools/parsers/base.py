"""The seam between what a model wrote and what is called."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

_PARSERS = {"hermes": "penstock.tools.parsers.hermes:HermesParser"}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as the model meant it. With `error` set it must not be dispatched: the model is told instead."""

    name: str
    """Empty where it could not be read."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    call_id: str = ""
    """``call_0``, ``call_1`` ...: position in the turn."""
    error: str | None = None
    """What is wrong with the call's form, in words for the model."""


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    content: str
    """What the model wrote around its calls, stripped."""
    calls: tuple[ToolCall, ...] = ()


class ToolCallParser(Protocol):
    """Called by agent loops with the decoded text of one model call (special tokens of the call syntax kept)."""

    def parse(self, text: str) -> ParsedTurn:
        """Never raises, whatever `text` is; malformed calls have `error` set."""


def get_parser(name: str) -> ToolCallParser:
    """Raises `ValueError` naming the nearest parser there is."""
    if name not in _PARSERS:
        close = difflib.get_close_matches(name, _PARSERS, n=1) or sorted(_PARSERS)
        raise ValueError(f"no tool-call parser {name!r}; did you mean {close[0]!r}?")
    module_name, _, class_name = _PARSERS[name].partition(":")
    parser: ToolCallParser = getattr(importlib.import_module(module_name), class_name)()
    return parser
