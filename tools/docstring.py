"""Descriptions from docstrings: the first paragraph, and Google's ``Args:`` section where there is one."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

_ARGUMENT = re.compile(r"^(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


def describe(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """(what the function does, argument name → what it is); lines are joined by spaces."""
    text = inspect.getdoc(function) or ""
    summary = text.split("\n\n", 1)[0]
    if re.match(r"Args:\s*$", summary.partition("\n")[0]):
        summary = ""
    return " ".join(summary.split()), _arguments(text.splitlines())


def _arguments(lines: list[str]) -> dict[str, str]:
    """Entries are indented once; deeper lines go on with the entry above; an unindented line ends the section."""
    found: dict[str, str] = {}
    start = next((i for i, line in enumerate(lines) if line.strip() in ("Args:", "Arguments:")), len(lines))
    name, indent = "", 0
    for line in lines[start + 1 :]:
        depth = len(line) - len(line.lstrip())
        if line.strip() and depth == 0:
            break
        match = _ARGUMENT.match(line.strip())
        indent = indent or depth
        if match and depth == indent:
            name = match[1]
            found[name] = match[2]
        elif name:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found
