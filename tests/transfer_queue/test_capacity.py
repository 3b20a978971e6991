"""Settings that could never work are refused with the sums that say so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.transfer_queue import Limits, QueueError, check_quotas, check_step_bytes

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
    with pytest.raises(QueueError, match=r"^quotas: code 3 \+ sums 2 = 5 < groups_per_step = 6: .* Raise them to 6 in"):
        check_quotas(limits, ["sums", "code", "sums"])


def test_a_step_fits_to_the_byte() -> None:
    """6 groups × 8 members × 9 bytes × 512 tokens = 221184."""
    check_step_bytes(replace(LIMITS, max_bytes=221184), response_tokens=512)
    sums = (
        r"max_bytes = 221183 < .* = 6 × 8 × 9 × 512 = 221184: one step may not fit\. Raise max_bytes to at least 221184"
    )
    with pytest.raises(QueueError, match=sums):
        check_step_bytes(replace(LIMITS, max_bytes=221183), response_tokens=512)
