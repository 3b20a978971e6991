"""Rows whose tokens are told their experts, the same in every process, and what is asked of an engine about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from penstock.trainer import ModelLimits, Pack, make_row, pack_rows
from penstock.trainer.batch import Row
from penstock.transfer_queue import Segment

LENGTHS = (9, 17, 12, 20, 6, 15, 11, 14)
"""Of the rows; of each the first three tokens are its prompt."""
UNTOLD = 3
"""The row that no engine told the experts of."""
BUDGET = 40
DIVISOR = 50.0
SETTINGS: dict[str, Any] = {"max_grad_norm": 1e6, "lr": 1e-3, "eps": 1e-4}
"""Nothing is clipped: the first moments of the first update are its gradients."""


def told_rows(limits: ModelLimits) -> list[Row]:
    assert limits.mixtures is not None
    draw, mixtures = np.random.default_rng(5), limits.mixtures
    rows = []
    for number, length in enumerate(LENGTHS):
        ids = draw.integers(0, limits.vocab, length).astype(np.int32)
        chosen = draw.random((length, mixtures.layers, mixtures.experts)).argsort(-1)[..., : mixtures.per_token]
        experts = chosen.astype(mixtures.dtype)
        experts[-1] = 0
        experts[4 : 4 + number % 3] = 0
        segment = Segment(
            prompt_ids=ids[:3],
            response_ids=ids[3:],
            response_mask=np.ones(length - 3, dtype=np.uint8),
            response_logprobs=np.zeros(length - 3, dtype=np.float32),
            version_spans=np.array([[0, 0, length - 3]], dtype=np.int32),
            turn_starts=np.array([0], dtype=np.int32),
            routed_experts=None if number == UNTOLD else experts,
        )
        rows.append(make_row(number, segment, f"row {number}", step=0, bound=0, model=limits))
    return rows


def packs_of(rows: Sequence[Row]) -> list[Pack]:
    return pack_rows(rows, BUDGET)


def weighted(pack: Pack, outputs: Any) -> Tensor:
    """A loss in which each row counts otherwise."""
    return -(outputs.logprobs * (1 + pack.episode)).sum()


def by_row(packs: Sequence[Pack], logprobs: Sequence[Tensor]) -> dict[str, Tensor]:
    return {
        f"row {number}": found[pack.episode == number].contiguous()
        for pack, found in zip(packs, logprobs, strict=True)
        for number in pack.episode.unique().tolist()
    }
