"""The queue's records: what stands in fields that are not given, and that nothing is added to one or changed in it."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import FrozenInstanceError, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
from queue_samples import LEASE, segment, trajectory

from penstock.testing import MemoryTransferQueue
from penstock.transfer_queue import (
    Announcement,
    DataCursor,
    Head,
    JournalEntry,
    JournalKind,
    Outcome,
    OutcomeKind,
    RunContext,
    RunIdentity,
    ServerInfo,
    Task,
    TurnCall,
    TurnSettings,
)
from penstock.transfer_queue.turns import TurnHolder

MODULES = [
    importlib.import_module(f"penstock.transfer_queue.{name}")
    for name in ("types", "status", "turns", "admission", "codec.packing", "redis.scripts", "redis.payloads")
]
RECORDS = {
    name: one
    for module in MODULES
    for name, one in vars(module).items()
    if inspect.isclass(one) and is_dataclass(one) and not name.startswith("_")
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_is_not_changed_and_has_no_dict(name: str) -> None:
    """Runs hold some millions of them, and several tasks share one."""
    kind: Any = RECORDS[name]
    made = object.__new__(kind)
    with pytest.raises(FrozenInstanceError):
        setattr(made, next(iter(kind.__dataclass_fields__)), None)
    with pytest.raises(TypeError, match="__dict__"):
        vars(made)


def test_records_that_say_little_have_defaults() -> None:
    task, entry = Task("t", "train", [], "sums", None), JournalEntry(JournalKind.TOOLS)
    assert (task.min_version, task.priority, task.group_size, task.agent_name) == (0, 0, None, None)
    assert DataCursor() == DataCursor(0, 0) < DataCursor(0, 1) < DataCursor(1, 0)
    assert (entry.context_len, entry.context_hash, entry.ids, entry.data) == (0, 0, None, {})
    server = ServerInfo("s", "http://a", 3)
    assert server == ServerInfo("s", "http://a", 3, 0, True, 0, False, None, "", False, "", age_s=2.0)
    assert TurnCall("engine", "a", 1, holds=True, ttl_s=1.0) == TurnCall("engine", "a", 1, True, 1.0, 0, 0, 0)
    assert TurnHolder("engine", "a", False, False, 0, 0).fence == 0
    assert TurnSettings() == TurnSettings(budget=0, ttl_s=15.0, hand_over_s=900.0, sleep_level=1)


def test_a_role_shows_no_token() -> None:
    context = RunContext(MemoryTransferQueue(), "model", token="a-secret")
    assert "a-secret" not in repr(context)
    assert (context.seed, context.max_model_len, context.routing_replay, context.teacher_top_k) == (0, 0, False, ())


@pytest.mark.parametrize("kind", OutcomeKind)
def test_only_three_outcomes_may_carry_a_reward(kind: OutcomeKind) -> None:
    assert Outcome(kind).may_carry_reward == (kind.value in ("completed", "truncated", "policy_error"))


def test_a_segment_knows_the_version_of_each_token() -> None:
    found = replace(segment([4, 4, 7]), version_spans=np.array([[4, 0, 2], [7, 2, 4]], dtype=np.int32))
    assert found.versions().tolist() == [4, 4, 7, -1], "the last one was observed, although a span covers it"
    uncovered = replace(found, version_spans=np.array([[4, 0, 1]], dtype=np.int32))
    assert uncovered.versions().tolist() == [4, -1, -1, -1]
    assert (found.num_turns, found.versions().dtype) == (1, np.int32)


def test_a_trajectory_knows_its_oldest_version() -> None:
    made = replace(trajectory(LEASE), segments=[segment([5, 6]), segment([]), segment([3])])
    assert (made.min_version, made.num_sampled) == (3, 3)
    assert replace(made, segments=[segment([])]).min_version is None
    assert (replace(made, segments=[]).num_sampled, trajectory(LEASE).num_turns) == (0, 1)


def test_an_identity_is_named_in_full() -> None:
    assert str(RunIdentity("a1", "", "m")) == "id a1, configuration none, model m"
    assert Head("first", 1.5).left_s == 1.5
    assert Announcement(3, {"path": "v3"}).version == 3
