"""What an episode spent its time on: a list of spans in its trajectory's `extra`, small enough to keep for each one.

Spans of the present run only: what a resumed episode is told from its journal takes no time and leaves none. Where
OpenTelemetry is on (`exported`), the same blocks are its spans.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from penstock.agent_loops.episode_spans import EpisodeSpans
from penstock.rollout_server import NO_SPAN, NoSpan, OpenSpan

MAX_SPANS = 256
"""Of one episode; further ones are counted."""
Span = tuple[str, str, float, float]
"""(kind: ``model``, ``tool``, ``reward``; name; start in seconds after the lease; seconds)"""
OnSpan = Callable[[str, str, float], None]
"""(kind, name, seconds) of a span that ended"""
_CURRENT: ContextVar[Trace | None] = ContextVar("trace of the episode", default=None)


@dataclass(slots=True)
class Trace:
    started: float = field(default_factory=time.monotonic)
    began_unix_s: float = field(default_factory=time.time)
    spans: list[Span] = field(default_factory=list)
    """In the order of their ends."""
    dropped: int = 0
    on_span: OnSpan | None = None
    exported: EpisodeSpans | None = None

    def add(self, kind: str, name: str, start: float) -> None:
        now = time.monotonic()
        if self.on_span is not None:
            self.on_span(kind, name, now - start)
        if len(self.spans) >= MAX_SPANS:
            self.dropped += 1
            return
        self.spans.append((kind, name, round(start - self.started, 4), round(now - start, 4)))

    def plain(self) -> dict[str, Any]:
        """For `extra`: ``trace``, ``began_unix_s`` by this machine's clock, ``trace_dropped`` where some did not fit,
        ``traceparent`` where OpenTelemetry is on."""
        told: dict[str, Any] = {"trace": [list(span) for span in self.spans], "began_unix_s": self.began_unix_s}
        if self.dropped:
            told["trace_dropped"] = self.dropped
        if self.exported is not None:
            told["traceparent"] = self.exported.root.traceparent
        return told


def begin_trace(on_span: OnSpan | None = None, exported: EpisodeSpans | None = None) -> Trace:
    """A new one for this task and those that it starts."""
    trace = Trace(on_span=on_span, exported=exported)
    _CURRENT.set(trace)
    return trace


@contextmanager
def span(kind: str, name: str = "") -> Iterator[OpenSpan | NoSpan]:
    """Time a block, also where it fails; nothing where no episode runs. What it gives takes further facts."""
    trace, start = _CURRENT.get(), time.monotonic()
    if trace is None:
        yield NO_SPAN
        return
    exported = trace.exported
    try:
        if exported is None:
            yield NO_SPAN
        else:
            with exported.span(kind, name) as told:
                yield told
    finally:
        trace.add(kind, name, start)


@contextmanager
def exported_span(kind: str, name: str) -> Iterator[OpenSpan | NoSpan]:
    """For OpenTelemetry alone: a part of what `span` times already."""
    trace = _CURRENT.get()
    exported = trace.exported if trace is not None else None
    with nullcontext(NO_SPAN) if exported is None else exported.span(kind, name) as told:
        yield told
