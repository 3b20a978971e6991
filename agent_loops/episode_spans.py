"""An episode's OpenTelemetry spans, where they are on: episode ─► turns ─► what happened in each.

A turn begins with a model call and holds what follows it, up to the next model call of the same branch: branches that
run side by side are tasks, and each has turns of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from penstock.rollout_server import TRACING, OpenSpan, begin, here, inside
from penstock.transfer_queue import Lease, Outcome, OutcomeKind

NAMES = {"model": "generate", "tool": "tool", "reward": "reward", "sandbox": "sandbox"}
OPERATIONS = {"model": "text_completion", "tool": "execute_tool"}


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


_TURN: ContextVar[_Turn | None] = ContextVar("turn of the episode", default=None)


class EpisodeSpans:
    """Made for one run of an episode, in its task. `end` is its last call."""

    def __init__(self, lease: Lease, worker: str) -> None:
        facts = {"episode": lease.episode_id, "task": lease.task.task_id, "split": lease.task.split}
        self.root = begin("episode", None, {**facts, "worker": worker, "attempt": lease.attempt})
        self._facts = facts
        self._turns: list[_Turn] = []
        _TURN.set(None)

    @contextmanager
    def span(self, kind: str, name: str) -> Iterator[OpenSpan]:
        """A block of the episode. A model call begins a turn; the reward belongs to none."""
        if kind == "model":
            self._begin_turn()
        turn = _TURN.get() if kind != "reward" else None
        around = here() if kind == "sandbox" else None
        parent = around or (turn.span.context if turn is not None else self.root.context)
        facts = {**self._facts, "operation": OPERATIONS.get(kind), "tool": name if kind == "tool" else None}
        made = begin(f"{NAMES.get(kind, kind)} {name}".strip(), parent, facts)
        try:
            with inside(made):
                yield made
        finally:
            if turn is not None:
                turn.last_ns = time.time_ns()

    def outcome(self, outcome: Outcome) -> None:
        """How it ended, as the queue was told."""
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

    def _begin_turn(self) -> None:
        before = _TURN.get()
        # What another task began goes on there: a tool of it may be what started this branch.
        if before is not None and before.branch is asyncio.current_task():
            before.end()
        turn = _Turn(begin("turn", self.root.context, {**self._facts, "turn": len(self._turns)}))
        self._turns.append(turn)
        _TURN.set(turn)


def episode_spans(lease: Lease, worker: str) -> EpisodeSpans | None:
    """None where spans are off."""
    return EpisodeSpans(lease, worker) if TRACING.tracer is not None else None


def trajectory_facts(trajectory: Any) -> dict[str, Any]:
    """Of a finished episode: its reward, turns, tokens and versions."""
    versions = [int(v) for segment in trajectory.segments for v in segment.version_spans[:, 0]]
    return {
        "reward": trajectory.reward,
        "turns": trajectory.num_turns,
        "output_tokens": trajectory.num_sampled,
        "version": max(versions, default=None),
        "version_oldest": min(versions, default=None),
    }
