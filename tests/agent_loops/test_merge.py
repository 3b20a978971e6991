"""A loop's own outputs, edited by hand: refused where they are not what the engine was fed and returned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash
from tests.agent_loops.talking import say

from penstock.agent_loops import (
    AgentLoopOutput,
    Budget,
    InfraFailure,
    SegmentBuilder,
    TokenMismatch,
    check_output,
    to_trajectory,
)
from penstock.transfer_queue import Lease, Segment, Task


def finished() -> tuple[AgentLoopOutput, Any]:
    """Prompt 1 2, answer 3 4, observation 5, answer 6."""
    segment, seen = SegmentBuilder([1, 2], Budget(9, 99)), SimpleNamespace(before=set(), after=set())
    for sampled, observed in (([3, 4], [5]), ([6], [])):
        seen.before.add(mark(segment))
        say(segment, sampled)
        seen.after.add(mark(segment))
        segment.observe(observed)
    return segment.output(), seen


def mark(segment: SegmentBuilder) -> tuple[int, int]:
    ids = np.array(segment.context(), dtype="<i4")
    return len(ids), xxhash.xxh3_64_intdigest(ids.tobytes())


def array(values: list[int], dtype: str = "int32") -> np.ndarray:
    return np.array(values, dtype=dtype)


WRONG: dict[str, tuple[Callable[[Segment], dict[str, Any]], type[Exception], str]] = {
    "another answer": (
        lambda _: {"response_ids": array([3, 9, 5, 6])},
        TokenMismatch,
        "up to 4 are not what the engine sampled",
    ),
    "another prompt": (lambda _: {"prompt_ids": array([1, 9])}, TokenMismatch, "up to 2 are not .* was fed"),
    "another observation": (
        lambda _: {"response_ids": array([3, 4, 9, 6])},
        TokenMismatch,
        "up to 5 are not what the engine was fed",
    ),
    "a short mask": (lambda one: {"response_mask": one.response_mask[:-1]}, TokenMismatch, r"lengths \[3, 4\]"),
    "few logprobs": (lambda one: {"response_logprobs": one.response_logprobs[:-1]}, TokenMismatch, "lengths"),
    "no turn": (lambda _: {"turn_starts": array([])}, InfraFailure, "nothing was sampled"),
    "an answer of no turn": (
        lambda _: {"response_mask": array([1, 0, 1, 1], "uint8")},
        TokenMismatch,
        "belong to no turn",
    ),
}


def test_merge_takes_what_a_segment_builder_made() -> None:
    output, seen = finished()
    check_output(output, seen)


def test_a_trajectory_names_its_task_as_the_row_does() -> None:
    output, _ = finished()
    for row, kept in (({"instance_id": "hello-file"}, {"instance_id": "hello-file"}), ({"index": 3}, {})):
        lease = Lease("t#0", Task("t", "train", [], "harbor", "", extra_info=row), 0, 0, 1, 0)
        assert dict(to_trajectory(lease, [output], 1.0, {}, {}).extra) == kept


@pytest.mark.parametrize(("edit", "kind", "problem"), WRONG.values(), ids=WRONG)
def test_merge_refuses_an_edited_output(
    edit: Callable[[Segment], dict[str, Any]], kind: type[Exception], problem: str
) -> None:
    output, seen = finished()
    with pytest.raises(kind, match=problem):
        check_output(replace(output, **edit(output)), seen)
