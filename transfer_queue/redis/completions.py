"""Ended episodes: the payload is stored and acknowledged in one round trip.

On a cluster the payload is reserved first, so that one of a writer that dies is swept; then it goes to its nodes, and
script ``complete`` after it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.transfer_queue.codec.packing import pack_plain
from penstock.transfer_queue.codec.trajectories import outcome_to_plain
from penstock.transfer_queue.errors import QueueError, QueueUnavailable
from penstock.transfer_queue.metrics import payload_cost
from penstock.transfer_queue.redis.client import Connection
from penstock.transfer_queue.redis.keys import Keys
from penstock.transfer_queue.redis.payloads import Payloads, StoredPayload
from penstock.transfer_queue.types import Lease, Trajectory
from penstock.transfer_queue.validation import finish


def new_nonce() -> str:
    """Names one completion: a process that ends an episode again under the same fence may say something else of it."""
    return secrets.token_hex(4)


@dataclass(frozen=True, slots=True)
class Completion:
    """A packed trajectory: the commands that store it, and the arguments and keys of script ``complete``."""

    stored: StoredPayload
    writes: Sequence[Sequence[Any]]
    arguments: Sequence[Any]
    keys: Sequence[str]


class Completions:
    """`TransferQueue.complete` of one run."""

    def __init__(self, connection: Connection, keys: Keys, payloads: Payloads, compression: str) -> None:
        self._connection = connection
        self._keys = keys
        self._payloads = payloads
        self._compression = compression

    async def complete(self, lease: Lease, trajectory: Trajectory) -> None:
        """Store and acknowledge; the payload is deleted if it is refused, or if another completion under the same fence
        has ended the episode."""
        one = self.pack(lease, trajectory)
        if self._connection.spreads:
            await self._connection.script("reserve", self._keys.index, one.stored.row)
        try:
            acknowledged = await self._connection.write_and_run(
                one.writes, "complete", self._keys.index, *one.arguments, keys=one.keys
            )
        except QueueUnavailable:
            raise  # it may have been acknowledged; otherwise it expires or is swept
        except QueueError:
            await self._payloads.delete([one.stored])
            raise
        if not acknowledged:
            await self._payloads.delete([one.stored])

    def pack(self, lease: Lease, trajectory: Trajectory) -> Completion:
        """Raises `BadPayload`."""
        result = finish(lease, trajectory, compression=self._compression)
        nonce = new_nonce()
        stored = StoredPayload(f"{lease.episode_id}@{lease.fence}.{nonce}", result.packed.size)
        keys = [] if self._connection.spreads else self._payloads.keys(stored)
        numbers = (
            len(keys),
            stored.size,
            payload_cost(stored.size),
            "" if result.reward is None else repr(result.reward),
            "" if result.lowest_version is None else result.lowest_version,
            result.highest_version,
            result.tokens,
            result.sampled,
            nonce,
        )
        outcome = pack_plain(outcome_to_plain(trajectory.outcome), "outcome") if result.reward is None else ""
        writes = self._payloads.writes(stored, result.packed)
        return Completion(stored, writes, (lease.episode_id, lease.fence, *numbers, outcome), keys)
