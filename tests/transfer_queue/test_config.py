"""Settings of the queue: where their ranges end, and that nothing changes them once they are read."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.transfer_queue import Limits, TransferQueueConfig

LEAST = {
    "min_group": 1,
    "max_attempts": 1,
    "max_lost_leases": 4,
    "max_bytes": 1,
    "max_groups": 0,
    "max_filtered_steps": 0,
}
DURATIONS = ["start_timeout_s", "lease_ttl_s", "registry_ttl_s", "deadline_s"]


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [*((name, least, least - 1) for name, least in LEAST.items()), *((name, 0.5, 0.0) for name in DURATIONS)],
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
    "spill": True,
}


def test_config_stays_as_it_was_read() -> None:
    config: Any = TransferQueueConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.max_attempts = 9
