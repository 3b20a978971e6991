"""Hand-worked numbers for admission and shipping; limits and settings that could never work are refused."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.transfer_queue import (
    Limits,
    QueueError,
    Status,
    TransferQueueConfig,
    check_limits,
    check_quotas,
    check_step_bytes,
    evaluation_split,
    may_admit,
    may_ship,
    under_evaluation,
)
from penstock.transfer_queue.admission import enough_members, places, room_allows


def test_places_are_those_of_open_steps() -> None:
    assert [places(step, 3, 4) for step in (1, 2, 3, 4, 5)] == [0, 0, 4, 8, 12]


@pytest.mark.parametrize("staleness", [0, 1, 2, 5])
def test_fresh_workers_fill_exactly_the_steps_within_the_bound(staleness: int) -> None:
    version, per_step, dues = 7, 4, []
    while may_admit(version + staleness, dues, version, per_step):
        dues.append(version + staleness)
    assert len(dues) == (staleness + 1) * per_step


def test_a_worker_that_is_too_far_behind_is_refused() -> None:
    # Version 5, staleness 2: a server at version 2 would have to ship at step 4, which is fixed.
    assert not may_admit(2 + 2, [], 5, 8)
    assert may_admit(3 + 2, [], 5, 8)


def test_an_old_server_takes_only_the_places_that_its_due_leaves() -> None:
    # Steps 5, 6, 7 open with 2 places each. Three groups are due at 7, none before.
    assert may_admit(5, [7, 7, 7], 5, 2)
    assert may_admit(5, [5, 7, 7, 7], 5, 2)
    assert not may_admit(5, [5, 5, 7, 7, 7], 5, 2)
    # Later dues have no place left although step 5 itself has: six groups in six places.
    assert not may_admit(5, [7] * 6, 5, 2)


def test_a_fixed_step_ahead_takes_its_places_away() -> None:
    # Version 5, staleness 0, step 5 already shipped: nothing that is due at 5 may start.
    assert not may_admit(5, [], 6, 8)


def test_shipping_overtakes_only_groups_that_ship_in_time() -> None:
    assert may_ship([], [], 4, 2)
    assert not may_ship([], [4], 4, 2)  # due now
    assert may_ship([], [5, 5], 4, 2)  # both fit into step 5
    assert not may_ship([5, 5], [5], 4, 2)
    assert may_ship([5, 6], [5, 6], 4, 2)
    assert not may_ship([5, 6], [6, 6, 6], 4, 2)
    assert may_ship([4, 5, 5], [6], 4, 2)  # nothing that is due still runs


def test_back_pressure_always_leaves_one_step() -> None:
    assert room_allows(10, 10, 50, 0, 8)
    assert not room_allows(11, 10, 8, 0, 8)
    assert room_allows(11, 10, 7, 0, 8)


def test_small_groups_need_no_more_members_than_they_have() -> None:
    assert enough_members(1, 1, 2)
    assert not enough_members(1, 4, 2)
    assert enough_members(2, 4, 2)


LIMITS = Limits(group_size=8, groups_per_step=6, max_staleness=1)


@pytest.mark.parametrize(
    ("quotas", "sources"),
    [
        ({}, ["sums", "code"]),
        ({"sums": 1}, ["sums", "code"]),
        ({"sums": 2, "code": 4}, ["sums", "code"]),
        ({"sums": 6}, ["sums", "sums"]),
        ({"sums": 1}, []),
    ],
)
def test_quotas_that_fill_a_step_pass(quotas: dict[str, int], sources: list[str]) -> None:
    check_quotas(replace(LIMITS, quotas=quotas), sources)


def test_quotas_that_cannot_fill_a_step_are_refused_with_the_sum() -> None:
    limits = replace(LIMITS, quotas={"sums": 2, "code": 3, "absent": 50})
    for quotas in (limits.quotas, {"sums": 2, "code": 3}):
        with pytest.raises(
            QueueError, match=r"^quotas: code 3 \+ sums 2 = 5 < groups_per_step = 6: .* Raise them to 6 in"
        ):
            check_quotas(replace(limits, quotas=quotas), ["sums", "code", "sums"])


LEAST = {
    "group_size": 1,
    "groups_per_step": 1,
    "min_group": 1,
    "max_attempts": 1,
    "max_lost_leases": 4,
    "max_bytes": 1,
    "max_staleness": 0,
    "max_groups": 0,
    "max_filtered_steps": 0,
    "lease_ttl_s": 0.001,
}


@pytest.mark.parametrize(("name", "least"), LEAST.items())
def test_limits_are_refused_below_their_least(name: str, least: float) -> None:
    check_limits(replace(LIMITS, **{name: least}))
    with pytest.raises(QueueError, match=f"limits: {name} is .* at least {least}"):
        check_limits(replace(LIMITS, **{name: least - (1 if least == int(least) else 0.0005)}))


@pytest.mark.parametrize(
    ("wrong", "right", "named"),
    [
        ({"quotas": {"sums": 0}}, {"quotas": {"sums": 1}}, "quota of 'sums' is 0"),
        ({"overage": "keep"}, {"overage": "mask"}, "overage is 'keep'; one of wait, mask, drop"),
        ({"filter_groups": "all"}, {"filter_groups": "zero_variance"}, "filter_groups is 'all'"),
        ({"max_groups": 5}, {"max_groups": 6}, "max_groups = 5 < groups_per_step = 6"),
        (
            {"filter_groups": "zero_variance", "group_size": 1},
            {"filter_groups": "zero_variance", "group_size": 2},
            "group_size = 1 would filter every group",
        ),
    ],
)
def test_limits_that_can_fill_no_step_are_refused(wrong: dict, right: dict, named: str) -> None:
    check_limits(replace(LIMITS, **right))
    with pytest.raises(QueueError, match=f"limits: .*{named}"):
        check_limits(replace(LIMITS, **wrong))


def test_a_step_fits_to_the_byte() -> None:
    """6 groups × 8 members × 9 bytes × 512 tokens = 221184."""
    check_step_bytes(replace(LIMITS, max_bytes=221184), response_tokens=512)
    sums = (
        r"max_bytes = 221183 < .* = 6 × 8 × 9 × 512 = 221184: one step may not fit\. Raise max_bytes to at least 221184"
    )
    with pytest.raises(QueueError, match=sums):
        check_step_bytes(replace(LIMITS, max_bytes=221183), response_tokens=512)


@pytest.mark.parametrize(
    ("splits", "busy"),
    [
        ({}, False),
        ({"eval/4": {"queued": 1, "leased": 0, "done": 0}}, True),
        ({"eval/4": {"queued": 0, "leased": 1, "done": 3}}, True),
        ({"eval/4": {"queued": 0, "leased": 0, "done": 4}}, False),
        ({"eval/3": {"queued": 1}}, True),
        ({"eval/5": {"queued": 1}}, False),
        ({"eval/5": {"queued": 1}, "eval/2": {"leased": 1}}, True),
        ({"by hand": {"queued": 1}}, True),
        ({"eval/best": {"queued": 1}}, True),
    ],
)
def test_which_splits_a_server_at_version_4_is_needed_by(splits: dict[str, dict[str, int]], busy: bool) -> None:
    assert under_evaluation(Status(9, 9, 9, {}, {}, 0, {}, {}, other_splits=splits), 4) == busy


def test_a_split_is_named_after_its_version() -> None:
    assert evaluation_split(12) == "eval/12"


# settings -----------------------------------------------------------------------------------------------------------
WHOLE = [name for name in LEAST if name in TransferQueueConfig.model_fields and name != "lease_ttl_s"]
DURATIONS = ["start_timeout_s", "lease_ttl_s", "registry_ttl_s", "deadline_s"]


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [*((name, LEAST[name], LEAST[name] - 1) for name in WHOLE), *((name, 0.5, 0.0) for name in DURATIONS)],
)
def test_config_takes_a_number_in_its_range(name: str, good: float, bad: float) -> None:
    assert getattr(TransferQueueConfig(**{name: good}), name) == good
    with pytest.raises(ValidationError, match=name):
        TransferQueueConfig(**{name: bad})


@pytest.mark.parametrize("wrong", [{"max_atempts": 3}, {"overage": "keep"}, {"quotas": {"sums": "many"}}])
def test_config_refuses_by_name_what_it_does_not_know(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ValidationError, match=name):
        TransferQueueConfig(**wrong)


def test_config_has_the_defaults_of_the_limits() -> None:
    config, limits = TransferQueueConfig(), Limits(1, 1, 0)
    assert {name: getattr(config, name) for name in DEFAULTS} == DEFAULTS
    shared = DEFAULTS.keys() & {one.name for one in fields(Limits)}
    assert {name: getattr(limits, name) for name in shared} == {name: DEFAULTS[name] for name in shared}


DEFAULTS = {
    "min_group": 2,
    "max_attempts": 3,
    "max_lost_leases": 4,
    "max_bytes": 4 << 30,
    "max_groups": 0,
    "filter_groups": "none",
    "max_filtered_steps": 10,
    "quotas": {},
    "overage": "wait",
    "archive": None,
    "archive_bytes": 8 << 30,
}


def test_config_stays_as_it_was_read() -> None:
    config: Any = TransferQueueConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.max_attempts = 9
