"""Data files among the hidden tests: which values in them may be what a test expects, and other values for these.

A value keeps its form (a digit for a digit, a letter for a letter, the same length), so the file stays readable and
shows nothing. Which values are expectations no file says: `STRATEGIES` are guesses, proven with the reference patch.
"""

from __future__ import annotations

import posixpath
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.sandbox.swe.source import Edit, other_sign
from penstock.sandbox.swe.task import SweTask

MAX_DATA_BYTES = 1 << 20
"""Limit of a file whose values are changed; a larger one is only hidden."""
_HEADER = re.compile(rb"^\+\+\+ b/([^\t\n\"]+)$", re.MULTILINE)
_CODE = (".py", ".pyi", ".pyx", ".pyc", ".so", ".cfg", ".ini", ".toml")
_TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*"|-?\d+(?:\.\d+)?(?![\w.])|[A-Za-z]+')
_WORDS = {"true", "false", "null", "None", "True", "False", "nan", "NaN", "inf", "Infinity"}


def hidden_data(task: SweTask) -> tuple[str, ...]:
    """Files that `test_patch` brings or changes, and that no interpreter or pytest reads."""
    binary = re.compile(rb"^diff --git a/([^\t\n\"]+) b/\1$", re.MULTILINE)
    named = [*_HEADER.findall(task.test_patch), *binary.findall(task.test_patch)]
    paths = dict.fromkeys(one.decode("utf-8", "surrogateescape").rstrip("\r") for one in named)
    return tuple(path for path in paths if posixpath.splitext(path)[1] not in _CODE)


@dataclass(frozen=True, slots=True)
class Value:
    """A number or a text in a data file."""

    start: int
    text: str
    key: str
    """The name before it, as in ``"expected": 7``; empty if there is none."""
    last: bool
    """Nothing comes after it in its line."""


Strategy = Callable[[Value], bool]
STRATEGIES: tuple[Strategy, ...] = (
    lambda value: bool(re.search(r"(?i)expect|output|result|answer|want|solution|target", value.key)),
    lambda value: value.last,
    lambda value: True,
)
"""Guesses: values chosen by name; the last value of each record; any value."""


def changed_data(files: Mapping[str, bytes], selects: Strategy, dice: random.Random, odds: float) -> dict[str, bytes]:
    """The files of which something was changed, each wanted value at `odds`."""
    changed: dict[str, bytes] = {}
    for path, data in files.items():
        edits = [
            edit
            for value in _values(data)
            if selects(value) and dice.random() < odds and (edit := _other_value(value, dice)) is not None
        ]
        for edit in reversed(edits):
            changed[path] = edit.apply(changed.get(path, data))
    return changed


def _values(data: bytes) -> list[Value]:
    """None of a file that is not ASCII text: places in it would not be places of its characters."""
    if len(data) > MAX_DATA_BYTES or not data.isascii() or b"\0" in data:
        return []
    values_of_file: list[Value] = []
    start = 0
    for line in data.decode("ascii").splitlines(keepends=True):
        tokens = list(_TOKEN.finditer(line))
        keys = [line[token.end() :].lstrip()[:1] in (":", "=") for token in tokens]
        values = [index for index, token in enumerate(tokens) if not keys[index] and token.group() not in _WORDS]
        for index in values:
            key = tokens[index - 1].group() if index and keys[index - 1] else ""
            token = tokens[index]
            values_of_file.append(Value(start + token.start(), token.group(), key, index == values[-1]))
        start += len(line)
    return values_of_file


def _other_value(value: Value, dice: random.Random) -> Edit | None:
    """None of an empty text, and of a text that holds no letter or digit outside its escapes."""
    places = _places(value.text)
    if not places:
        return None
    at = dice.choice(places)
    return Edit(value.start + at, value.start + at + 1, other_sign(value.text[at], dice))


def _places(text: str) -> list[int]:
    """Places to change: the first digit of a number that counts; any letter or digit of a text outside escapes."""
    if not text.startswith('"') and any(sign.isdigit() for sign in text):
        counting = [at for at, sign in enumerate(text) if sign in "123456789"]
        return counting[:1] or [text.index("0")] if text.strip("-") != "" else []
    escaped = {at for match in re.finditer(r"\\(?:u[0-9a-fA-F]{4}|.)", text) for at in range(*match.span())}
    return [at for at, sign in enumerate(text) if sign.isalnum() and at not in escaped]
