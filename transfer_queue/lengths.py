"""Response lengths of finished episodes in buckets, and their deciles: who is over-age, the long or the short?"""

from __future__ import annotations

import math
from collections.abc import Mapping

from penstock.transfer_queue.queue import LengthDecile

PER_OCTAVE = 12
"""Buckets per doubling of the length; `lua/parts/lengths.lua` mirrors `bucket_of`."""


def bucket_of(tokens: int) -> int:
    return math.floor(PER_OCTAVE * math.log(tokens + 1) / math.log(2) + 1e-9)


def longest_in(bucket: int) -> int:
    """Most tokens of a response in the bucket."""
    return math.ceil(2 ** ((bucket + 1) / PER_OCTAVE) - 1e-9) - 2


def deciles(finished: Mapping[int, int], over_age: Mapping[int, int]) -> list[LengthDecile]:
    """Ten rows, shortest first, from bucket → episodes; a bucket that lies across a border is divided evenly."""
    total = sum(finished.values())
    if total == 0:
        return []
    rows = [_row(finished, over_age, total * i / 10, total * (i + 1) / 10) for i in range(10)]
    ends = [round(sum(row[1] for row in rows[: i + 1])) for i in range(10)]
    over = [round(sum(row[2] for row in rows[: i + 1])) for i in range(10)]
    return [
        LengthDecile(rows[i][0], ends[i] - (ends[i - 1] if i else 0), over[i] - (over[i - 1] if i else 0))
        for i in range(10)
    ]


def _row(finished: Mapping[int, int], over_age: Mapping[int, int], low: float, high: float) -> tuple[int, float, float]:
    """(longest response, episodes, over-age ones) between the `low`-th and the `high`-th shortest episode."""
    longest, episodes, over, at = 0, 0.0, 0.0, 0
    for bucket in sorted(finished):
        count = finished[bucket]
        share = max(0.0, min(high, at + count) - max(low, at))
        if share > 0:
            longest = longest_in(bucket)
            episodes += share
            over += over_age.get(bucket, 0) * share / count
        at += count
    return longest, episodes, over
