"""Do all ranks hold the same batch? Asked before the first forward of a step.

Each rank leases and reads a step by itself, and the queue gives all of them the same answer. A Redis that lost its
newest writes between two of those calls may fix the step anew: of other groups, or of the same ones in another life,
which ranks would then share out by other costs. A group would be trained twice or not at all, and nothing else says so.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import xxhash

from penstock.trainer.batch import StepBatch
from penstock.trainer.ranks.distributed import Ranks

NAMED = 8
"""Groups that a message names, of each rank."""


class BatchesDiffer(RuntimeError):
    """Ranks hold different batches for one step. The message says which; a restart leases and reads them again."""


def check_same_batch(ranks: Ranks, batch: StepBatch) -> None:
    """A collective. Raises `BatchesDiffer` on all ranks unless they hold one step of the same groups, each of which one
    copy of the model trains, and all ranks of a copy with the same rows: tokens, logprobs, versions and rewards, what
    teachers say of them and which experts read them."""
    if ranks.world == 1:
        return
    trained = sorted(set(batch.group.tolist()))
    groups = xxhash.xxh3_64_hexdigest(json.dumps(batch.groups).encode())
    shares = ranks.gather({"step": batch.step, "groups": groups, "trained": trained, "rows": _digest(batch)})
    if not _is_one_batch(ranks, shares, [index for index, group in enumerate(batch.groups) if group]):
        raise BatchesDiffer(f"step {batch.step}: the ranks hold different batches: {_described(ranks, batch)}")


def _is_one_batch(ranks: Ranks, shares: Sequence[dict[str, Any]], groups: list[int]) -> bool:
    copies: dict[int, dict[str, Any]] = {}
    for rank, one in enumerate(shares):
        if one != copies.setdefault(ranks.layout.place(rank, ranks.world).replica, one):
            return False
    parts = list(copies.values())
    same = all((one["step"], one["groups"]) == (parts[0]["step"], parts[0]["groups"]) for one in parts)
    return same and sorted(group for one in parts for group in one["trained"]) == groups


def _digest(batch: StepBatch) -> str:
    """Return a digest of the batch of this rank."""
    digest = xxhash.xxh3_64(batch.rewards.tobytes())
    for row in batch.rows:
        for numbers in (row.ids, row.targets, row.behaviour, row.staleness, row.mask):
            digest.update(numbers.tobytes())
        for extra in (row.teacher, row.top_ids, row.top_logprobs, row.experts):
            # The shape too: without it one that is missing could be made up for by the next one.
            digest.update(repr(None if extra is None else (extra.shape, str(extra.dtype))).encode())
            digest.update(b"" if extra is None else extra.tobytes())
    return digest.hexdigest()


def _described(ranks: Ranks, batch: StepBatch) -> str:
    """A collective. What each rank holds: its step, the groups that not all ranks have, and what it trains."""
    trained = [batch.groups[index] for index in sorted(set(batch.group.tolist()))]
    shares = ranks.gather({"step": batch.step, "groups": batch.groups, "trained": trained, "rows": _digest(batch)})
    everywhere = [group for group in shares[0]["groups"] if all(group in one["groups"] for one in shares)]
    return "; ".join(
        f"rank {rank}: step {one['step']}, {len(one['groups'])} groups, only here "
        f"{_names([group for group in one['groups'] if group not in everywhere])}, "
        f"trains {_names(one['trained'])} (rows {one['rows']})"
        for rank, one in enumerate(shares)
    )


def _names(groups: Sequence[Sequence[str]]) -> str:
    """Return the names of groups, by their episodes."""
    named = [f"{group[0].rpartition('#')[0]} of {len(group)}" for group in groups[:NAMED] if group]
    more = [f"{len(groups) - NAMED} more"] if len(groups) > NAMED else []
    return ", ".join(named + more) or "none"
