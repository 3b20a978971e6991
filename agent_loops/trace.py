"""What an episode spent its time on: a list of spans in its trajectory's `extra`, small enough to keep for each one.

Spans of the present run only: what a resumed episode is told from its journal takes no time and leaves none.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

MAX_SPANS = 256
"""Of one episode; further ones are counted."""
Span = tuple[str, str, float, float]
"""(kind: ``model``, ``tool``, ``reward``; name; start in seconds after the lease; seconds)"""
_CURRENT: ContextVar[Trace | None] = ContextVar("trace of the episode", default=None)


@dataclass(slots=True)
class Trace:
    started: float = field(default_factory=time.monotonic)
    spans: list[Span] = field(default_factory=list)
    """In the order of their ends."""
    dropped: int = 0

    def add(self, kind: str, name: str, start: float) -> None:
        if len(self.spans) >= MAX_SPANS:
            self.dropped += 1
            return
        now = time.monotonic()
        self.spans.append((kind, name, round(start - self.started, 4), round(now - start, 4)))

    def plain(self) -> dict[str, list[list[str | float]] | int]:
        """For `extra`: ``trace``, and ``trace_dropped`` where some did not fit."""
        told: dict[str, list[list[str | float]] | int] = {"trace": [list(span) for span in self.spans]}
        return {**told, "trace_dropped": self.dropped} if self.dropped else told


def begin_trace() -> Trace:
    """A new one for this task and those that it starts."""
    trace = Trace()
    _CURRENT.set(trace)
    return trace


@contextmanager
def span(kind: str, name: str = "") -> Iterator[None]:
    """Time a block, also where it fails; nothing where no episode runs."""
    trace, start = _CURRENT.get(), time.monotonic()
    try:
        yield
    finally:
        if trace is not None:
            trace.add(kind, name, start)
