"""Collects what one turn says and calls, in the order it was written."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.tools.parsers.base import ParsedTurn, ToolCall

MAX_CALLS = 128
"""Calls read of one turn. Each may cost a look at the whole rest of the text, so this keeps hostile text linear."""
THOUGHT = "</think>"
"""Ends a thought, which a prompt may have opened."""
UNREAD = " (what follows it was not read)"

NAME = r"[^\s<>{}\[\]\"`]{1,256}"
"""Name of a tool without quotes around it."""
_SPACE = re.compile(r"\s*")


class Malformed(ValueError):
    """A call that cannot be read; the message is for the model."""


class TurnBuilder:
    """`shape` says how a call is written; it ends every error."""

    def __init__(self, shape: str) -> None:
        self._shape = shape
        self._content: list[str] = []
        self._calls: list[ToolCall] = []

    @property
    def full(self) -> bool:
        """No further call is read; the last one is an error that says so."""
        return len(self._calls) > MAX_CALLS

    def say(self, text: str) -> None:
        self._content.append(text)

    def call(self, name: str, arguments: Mapping[str, Any], written_id: str = "") -> None:
        self._add(ToolCall(name, arguments, self._next_id(), written_id))

    def add(self, call: ToolCall) -> None:
        """A call that another parser read of a part of the turn."""
        self._add(replace(call, call_id=self._next_id()))

    def add_named(self, calls: Sequence[NamedCall]) -> None:
        for name, arguments in calls:
            self.call(name, arguments)

    def malformed(self, problem: str, name: str = "") -> None:
        """`name`: if it could be read."""
        error = f"malformed tool call: {problem}; {self._shape}"
        self._add(ToolCall(name if name.isascii() else "", call_id=self._next_id(), error=error))

    def done(self) -> ParsedTurn:
        return ParsedTurn("".join(self._content).strip(), tuple(self._calls))

    def _next_id(self) -> str:
        return f"call_{len(self._calls)}"

    def _add(self, call: ToolCall) -> None:
        if len(self._calls) == MAX_CALLS:
            call = ToolCall("", call_id=self._next_id(), error=f"only the first {MAX_CALLS} calls of a turn are read")
        if not self.full:
            self._calls.append(call)


Tools = Sequence[Mapping[str, Any]]


class MarkedParser(ABC):
    """A parser of calls that begin with the mark `opening`, behind a thought.

    A malformed call ends the reading: a later mark may be text that was meant as part of it, and must not run.
    """

    opening: str
    closing: str = ""
    thought_end: str = THOUGHT
    """The mark that ends a thought; calls before it are content. Empty: calls in a thought are calls."""
    resumes: bool = False
    """True if parsing continues behind the `closing` of a malformed call, or at the next `opening`."""
    shape: str
    """The written form of calls; ends every error."""

    def parse(self, text: str, tools: Tools = ()) -> ParsedTurn:
        turn = TurnBuilder(self.shape)
        position = self._behind_thought(text, tools)
        turn.say(text[:position])
        while not turn.full and (start := text.find(self.opening, position)) >= 0:
            turn.say(text[position:start])
            body = start + len(self.opening)
            try:
                position = self.read(text, body, turn, tools)
            except Malformed as problem:
                turn.malformed(str(problem) if self.resumes else f"{problem}{UNREAD}")
                position = _behind(text, body, self.opening, self.closing) if self.resumes else len(text)
        turn.say("" if turn.full else text[position:])
        return turn.done()

    def _behind_thought(self, text: str, tools: Tools) -> int:
        """Return the end of a thought at the beginning of the text: the first mark that stands in no argument of a
        call."""
        position, end = 0, text.find(self.thought_end) if self.thought_end else -1
        for _ in range(MAX_CALLS):
            start = text.find(self.opening, position, max(end, 0))
            if start < 0:
                break
            try:
                position = self.read(text, start + len(self.opening), TurnBuilder(""), tools)
            except Malformed:
                break
            if position > end:
                end = text.find(self.thought_end, position)
        return end + len(self.thought_end) if end >= 0 else 0

    @abstractmethod
    def read(self, text: str, body: int, turn: TurnBuilder, tools: Tools) -> int:
        """Adds the calls at `body`, behind the opening mark; returns where parsing continues. Raises `Malformed`."""


class SectionParser(MarkedParser):
    """A parser of sections: `opening`, one call after the other, `closing`."""

    def read(self, text: str, body: int, turn: TurnBuilder, tools: Tools) -> int:
        position = self.read_call(text, body, turn, tools)
        while not turn.full and not text.startswith(self.closing, skip_space(text, position)):
            position = self.read_call(text, position, turn, tools)
        return len(text) if turn.full else expect(text, position, self.closing)

    @abstractmethod
    def read_call(self, text: str, position: int, turn: TurnBuilder, tools: Tools) -> int:
        """Adds the call at `position`; returns its end. Raises `Malformed`."""


ReadMatch = Callable[[str, re.Match[str], TurnBuilder], int]
"""(text, what the pattern found, turn) → where parsing continues."""


def read_each(text: str, begins: re.Pattern[str], shape: str, read: ReadMatch, start: int = 0) -> ParsedTurn:
    """A turn in which `read` takes what `begins` finds from `start` on."""
    turn = TurnBuilder(shape)
    turn.say(text[:start])
    while not turn.full and (match := begins.search(text, start)):
        turn.say(text[start : match.start()])
        start = read(text, match, turn)
    turn.say("" if turn.full else text[start:])
    return turn.done()


NamedCall = tuple[str, Mapping[str, Any]]
ReadList = Callable[[str, int], tuple[Sequence[NamedCall], int]]
"""(text, where the body begins behind what the pattern found) → calls, where parsing continues. Raises `Malformed`."""


def read_unmarked(text: str, begins: re.Pattern[str], shape: str, read: ReadList) -> ParsedTurn:
    """A turn whose lists of calls begin where `begins` matches: no special token says so.

    What a model tries out in thought it does not ask for: a list that ends before the last ``</think>`` is content.
    A malformed list ends the reading, as in `MarkedParser`.
    """
    turn = TurnBuilder(shape)
    thought = text.rfind(THOUGHT) + len(THOUGHT) if THOUGHT in text else 0
    position = 0
    while not turn.full and (match := begins.search(text, position)):
        try:
            calls, end = read(text, match.end())
        except Malformed as problem:
            calls, end = (), len(text)
            error = f"{problem}{UNREAD}"
        if match.start() < thought and (not calls or end <= thought):
            turn.say(text[position:thought])
            position = thought
            continue
        turn.say(text[position : match.start()])
        if not calls:
            turn.malformed(error)
        turn.add_named(calls)
        position = end
    turn.say("" if turn.full else text[position:])
    return turn.done()


def _behind(text: str, body: int, opening: str, closing: str) -> int:
    """Behind the closing mark, or at the next call if that comes first."""
    close, following = text.find(closing, body), text.find(opening, body)
    if close >= 0 and (following < 0 or close < following):
        return close + len(closing)
    return following if following >= 0 else len(text)


def tool_name(text: str) -> str:
    """`text` if it is a name. Raises `Malformed`."""
    if not re.fullmatch(NAME, text):
        raise Malformed(
            "the name of the tool is missing" if not text.strip() else f"{text[:80]!r} is not a name of a tool"
        )
    return text


def skip_space(text: str, start: int) -> int:
    """Return the end of the space at `start`."""
    match = _SPACE.match(text, start)
    return match.end() if match else start


def expect(text: str, start: int, mark: str) -> int:
    """The place behind `mark`, which stands at `start` or behind space. Raises `Malformed`."""
    at = skip_space(text, start)
    if not text.startswith(mark, at):
        raise Malformed(f"other text stands where {mark} belongs" if text[at:] else f"{mark} is missing")
    return at + len(mark)


def until(text: str, start: int, mark: str) -> tuple[str, int]:
    """The text before `mark`, and the place behind it. Raises `Malformed`."""
    end = text.find(mark, start)
    if end < 0:
        raise Malformed(f"{mark} is missing")
    return text[start:end], end + len(mark)
