"""What a rank needs to start: its shard and little more, never the model."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from benchmarks.support.model import SIZES
from benchmarks.trainer import LOAD_RANKS, starts

pytestmark = pytest.mark.torch


def test_four_ranks_never_hold_more_than_their_shards_and_a_piece() -> None:
    """The bar of `penstock bench trainer` (docs/how/benchmarks.md) on 220 MB; the embedding alone is a shard."""
    found = starts(SIZES["56m"])
    assert len(found["ranks"]) == LOAD_RANKS
    shards = [one["shard_bytes"] for one in found["ranks"]]
    assert max(shards) < 1.05 * min(shards)
    assert found["load_peak_over_shard"] <= 1.3
