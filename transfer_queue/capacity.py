"""Settings under which a run could only stand still or burst, refused before it starts, with the arithmetic."""

from __future__ import annotations

from collections.abc import Collection

from penstock.transfer_queue.queue import Limits, QueueError

BYTES_PER_TOKEN = 9
"""Of a response: id 4, logprob 4, mask 1."""


def check_quotas(limits: Limits, sources: Collection[str]) -> None:
    """`sources`: every data_source of the dataset. Raises `QueueError` where the quotas together cannot fill a step.

    A source without a quota is not bounded and can fill any step.
    """
    if not sources or not set(sources) <= limits.quotas.keys():
        return
    parts = [f"{source} {limits.quotas[source]}" for source in sorted(set(sources))]
    total = sum(limits.quotas[source] for source in set(sources))
    if total < limits.groups_per_step:
        raise QueueError(
            f"quotas: {' + '.join(parts)} = {total} < groups_per_step = {limits.groups_per_step}: every data_source "
            f"has one and a step could never be filled. Raise them to {limits.groups_per_step} in sum, or leave one out"
        )


def check_step_bytes(limits: Limits, response_tokens: int) -> None:
    """`response_tokens`: most of one episode. Raises `QueueError` where a step's longest episodes pass `max_bytes`."""
    groups, members = limits.groups_per_step, limits.group_size
    needed = groups * members * BYTES_PER_TOKEN * response_tokens
    if needed > limits.max_bytes:
        raise QueueError(
            f"max_bytes = {limits.max_bytes} < groups_per_step × group_size × bytes per token × response tokens = "
            f"{groups} × {members} × {BYTES_PER_TOKEN} × {response_tokens} = {needed}: one step may not fit. "
            f"Raise max_bytes to at least {needed}, or lower one of the factors"
        )
