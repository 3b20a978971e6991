"""Edits of a text, as pure functions; what cannot be done is an `EditError` whose text the model reads."""

from __future__ import annotations

import re

CONTEXT_LINES = 4
MAX_NAMED_LINES = 5


class EditError(Exception):
    """The edit does not fit the file: told to the model, word for word."""


def replace_once(text: str, old: str, new: str, path: str) -> tuple[str, int]:
    """(new text, first changed line, from 1). Raises `EditError` unless `old` occurs exactly once."""
    if not old:
        raise EditError("old_text is empty; use insert to add lines, or create for a new file")
    if old == new:
        raise EditError("old_text and text are the same: nothing would change")
    count = text.count(old)
    if count == 0:
        raise EditError(f"old_text was not found in {path}{_whitespace_hint(text, old)}")
    if count > 1:
        lines = _lines_of(text, old)
        raise EditError(
            f"old_text is not unique in {path}: it occurs {count} times, at {lines}. Give more of the lines around it"
        )
    start = text.index(old)
    return text[:start] + new + text[start + len(old) :], text.count("\n", 0, start) + 1


def insert_after(text: str, line: int, new: str, path: str) -> tuple[str, int]:
    """(new text, first inserted line). `line` 0 is the top. Raises `EditError` past the end."""
    lines = text.splitlines(keepends=True)
    if not 0 <= line <= len(lines):
        raise EditError(f"line {line} is not in {path}: it has {len(lines)} lines (0 inserts at the top)")
    if line and not lines[line - 1].endswith("\n"):
        lines[line - 1] += "\n"
    lines.insert(line, new if new.endswith("\n") else f"{new}\n")
    return "".join(lines), line + 1


def numbered(text: str, first: int, last: int) -> str:
    """Lines `first` to `last` (from 1, both in), each with its number."""
    lines = text.splitlines()
    return "\n".join(f"{number:6}\t{lines[number - 1]}" for number in range(max(1, first), min(last, len(lines)) + 1))


def line_range(text: str, asked: list[int] | None, path: str) -> tuple[int, int]:
    """The lines to show; a last line of -1 is the end. Raises `EditError` where they are not in the file."""
    count = len(text.splitlines())
    if asked is None:
        return 1, count
    first, last = asked[0], count if asked[1] == -1 else asked[1]
    if not 1 <= first <= last or first > count:
        raise EditError(f"lines {asked[0]} to {asked[1]} are not in {path}: it has {count} lines")
    return first, min(last, count)


def around(text: str, first: int, new: str) -> str:
    """What the model reads after an edit: the changed lines with some before and after."""
    last = first + max(new.count("\n") - new.endswith("\n"), 0)
    return numbered(text, first - CONTEXT_LINES, last + CONTEXT_LINES)


def _whitespace_hint(text: str, old: str) -> str:
    """Most misses are a matter of indentation: say where the passage is if white space is left out of account."""
    words = old.split()
    if not words:
        return ""
    match = re.search(r"\s+".join(map(re.escape, words)), text)
    if match is None:
        return ""
    return f"; at line {text.count(chr(10), 0, match.start()) + 1} it differs in white space only: copy it exactly"


def _lines_of(text: str, old: str) -> str:
    lines: list[str] = []
    start = text.find(old)
    while start >= 0 and len(lines) < MAX_NAMED_LINES:
        lines.append(str(text.count("\n", 0, start) + 1))
        start = text.find(old, start + len(old))
    return f"lines {', '.join(lines)}{' …' if start >= 0 else ''}"
