"""Spans of an episode: where its time goes.

Trace          spans of the episode, kept in its trajectory's `extra`: small enough to keep for each one
EpisodeSpans   the same blocks as OpenTelemetry spans, where those are on: episode ─► turns ─► blocks of each turn;
               calls of a sandbox are blocks under the tool that makes them (`usage.observed`)

Spans are those of the current run: what a resumed episode takes from its journal takes no time and leaves none. A turn
begins with a model call and holds what follows it, up to the next model call of the same branch: branches that run
side by side are tasks, and each has its own turns.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from penstock.common import OpenSpan, current_context, spans_on, start_span
from penstock.common.tracing import NO_SPAN, NoSpan, use_span
from penstock.transfer_queue import Lease, Outcome, OutcomeKind

Span = tuple[str, str, float, float]
"""(kind: ``model``, ``tool``, ``reward``; name; start in seconds after the lease; seconds)"""
OnSpan = Callable[[str, str, float], None]
"""(kind, name, seconds) of a span that ended"""
OnUse = Callable[[str, str, float], None]
"""(episode, resource, amount)"""
_CURRENT: ContextVar[Trace | None] = ContextVar("trace of the episode", default=None)
_TURN: ContextVar[_Turn | None] = ContextVar("turn of the episode", default=None)


@dataclass(slots=True)
class Trace:
    started: float = field(default_factory=time.monotonic)
    began_unix_s: float = field(default_factory=time.time)
    spans: list[Span] = field(default_factory=list)
    """Spans in the order of their ends."""
    dropped: int = 0
    on_span: OnSpan | None = None
    exported: EpisodeSpans | None = None
    episode_id: str = ""
    on_use: OnUse | None = None

    def add(self, kind: str, name: str, start: float) -> None:
        now = time.monotonic()
        if self.on_span is not None:
            self.on_span(kind, name, now - start)
        if len(self.spans) >= 256:  # further spans are counted
            self.dropped += 1
            return
        self.spans.append((kind, name, round(start - self.started, 4), round(now - start, 4)))

    def plain(self) -> dict[str, Any]:
        """Return the fields for `extra`: ``trace``, ``began_unix_s`` by this machine's clock, ``trace_dropped`` where
        some did not fit, ``traceparent`` where OpenTelemetry is on.
        """
        recorded: dict[str, Any] = {"trace": [list(span) for span in self.spans], "began_unix_s": self.began_unix_s}
        if self.dropped:
            recorded["trace_dropped"] = self.dropped
        if self.exported is not None:
            recorded["traceparent"] = self.exported.root.traceparent
        return recorded


def begin_trace(
    on_span: OnSpan | None = None,
    exported: EpisodeSpans | None = None,
    episode_id: str = "",
    on_use: OnUse | None = None,
) -> Trace:
    """A new one for this task and those that it starts."""
    trace = Trace(on_span=on_span, exported=exported, episode_id=episode_id, on_use=on_use)
    _CURRENT.set(trace)
    return trace


def use(resource: str, amount: float) -> None:
    """Count what the episode of this task uses; nothing where no episode runs."""
    trace = _CURRENT.get()
    if trace is not None and trace.on_use is not None:
        trace.on_use(trace.episode_id, resource, amount)


def current_episode() -> str:
    """Return the id of the episode that this task runs, or an empty text."""
    trace = _CURRENT.get()
    return "" if trace is None else trace.episode_id


class span:
    """Time a block, also if it fails; nothing where no episode runs. What it gives takes further facts.

    A class: two of them are entered in every turn, and a generator costs several times as much.
    """

    __slots__ = ("_around", "_kind", "_name", "_start", "_trace")

    def __init__(self, kind: str, name: str = "") -> None:
        self._kind = kind
        self._name = name
        self._around: AbstractContextManager[OpenSpan] | None = None

    def __enter__(self) -> OpenSpan | NoSpan:
        self._trace, self._start = _CURRENT.get(), time.monotonic()
        if self._trace is None or self._trace.exported is None:
            return NO_SPAN
        self._around = self._trace.exported.span(self._kind, self._name)
        return self._around.__enter__()

    def __exit__(self, *raised: Any) -> None:
        try:
            if self._around is not None:
                self._around.__exit__(*raised)
        finally:
            if self._trace is not None:
                self._trace.add(self._kind, self._name, self._start)


@contextmanager
def exported_span(kind: str, name: str) -> Iterator[OpenSpan | NoSpan]:
    """A span for OpenTelemetry alone: a part of a span that `span` times."""
    trace = _CURRENT.get()
    exported = trace.exported if trace is not None else None
    with nullcontext(NO_SPAN) if exported is None else exported.span(kind, name) as recorded:
        yield recorded


class _Turn:
    """Ended when the next one of its branch begins, or with the episode: at the end of the last thing in it."""

    __slots__ = ("branch", "ended", "last_ns", "span")

    def __init__(self, span: OpenSpan) -> None:
        self.span = span
        self.branch = asyncio.current_task()
        self.last_ns = time.time_ns()
        self.ended = False

    def end(self) -> None:
        if not self.ended:
            self.ended = True
            self.span.end(self.last_ns)


class EpisodeSpans:
    """Made for one run of an episode, in its task. `end` is its last call."""

    def __init__(self, lease: Lease, worker: str) -> None:
        facts = {"episode": lease.episode_id, "task": lease.task.task_id, "split": lease.task.split}
        self.root = start_span("episode", None, {**facts, "worker": worker, "attempt": lease.attempt})
        self._facts = facts
        self._turns: list[_Turn] = []
        _TURN.set(None)

    @contextmanager
    def span(self, kind: str, name: str) -> Iterator[OpenSpan]:
        """A block of the episode. A model call begins a turn; the reward belongs to none."""
        if kind == "model":
            before = _TURN.get()
            # What another task began continues there: a tool of it may be what started this branch.
            if before is not None and before.branch is asyncio.current_task():
                before.end()
            begun = _Turn(start_span("turn", self.root.context, {**self._facts, "turn": len(self._turns)}))
            self._turns.append(begun)
            _TURN.set(begun)
        turn = _TURN.get() if kind != "reward" else None
        around = current_context() if kind == "sandbox" else None
        parent = around or (turn.span.context if turn is not None else self.root.context)
        operation = {"model": "text_completion", "tool": "execute_tool"}.get(kind)
        facts = {**self._facts, "operation": operation, "tool": name if kind == "tool" else None}
        doing = "generate" if kind == "model" else kind
        opened = start_span(f"{doing} {name}".strip(), parent, facts)
        try:
            with use_span(opened):
                yield opened
        finally:
            if turn is not None:
                turn.last_ns = time.time_ns()

    def outcome(self, outcome: Outcome) -> None:
        """Record the outcome that was reported to the queue."""
        self.root.note(outcome=outcome.kind.value, reason=outcome.reason or None, component=outcome.component or None)
        if outcome.kind is OutcomeKind.INFRA_ERROR:
            self.root.fail(f"{outcome.component}: {outcome.reason}")

    def end(self, cause: str = "") -> None:
        """`cause`: why it has no outcome."""
        for turn in self._turns:
            turn.end()
        if cause:
            self.root.fail(cause)
        self.root.end()


def episode_spans(lease: Lease, worker: str) -> EpisodeSpans | None:
    """None where spans are off."""
    return EpisodeSpans(lease, worker) if spans_on() else None


def trajectory_facts(trajectory: Any) -> dict[str, Any]:
    """Returns reward, turns, tokens and versions of a finished episode."""
    versions = [int(v) for segment in trajectory.segments for v in segment.version_spans[:, 0]]
    return {
        "reward": trajectory.reward,
        "turns": trajectory.num_turns,
        "output_tokens": trajectory.num_sampled,
        "version": max(versions, default=None),
        "version_oldest": min(versions, default=None),
    }
