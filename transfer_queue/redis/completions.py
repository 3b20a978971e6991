"""Ended episodes: their payloads are stored and acknowledged in one round trip, one episode or several.

    complete        SET payload; script ``complete``
    complete_many   the same of several; in shares, `SHARES_AT_ONCE` of them under way

On a cluster the payloads of a share are reserved first, so that those of a writer that dies are swept; then they go to
their nodes, and the scripts after them.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.common import gather_or_cancel
from penstock.transfer_queue.codec.packing import pack_plain
from penstock.transfer_queue.codec.trajectories import outcome_to_plain
from penstock.transfer_queue.errors import BadPayload, Refusal
from penstock.transfer_queue.metrics import payload_cost
from penstock.transfer_queue.redis.client import Connection, WriteAndRun
from penstock.transfer_queue.redis.keys import Keys
from penstock.transfer_queue.redis.payloads import Payloads, StoredPayload
from penstock.transfer_queue.types import Lease, Trajectory
from penstock.transfer_queue.validation import check_leases, finish

SHARE_BYTES = 512 << 10
"""Payloads of one round trip of `complete_many`: with more, what is under way leaves the caches of both sides."""
SHARE_EPISODES = 64
"""Scripts of one round trip; other clients wait for them."""
SHARES_AT_ONCE = 2
"""Round trips under way at once: one share is packed and sent while Redis works on the other."""


def new_nonce() -> str:
    """Names one completion: a process that ends an episode again under the same fence may say something else of it."""
    return secrets.token_hex(4)


@dataclass(frozen=True, slots=True)
class _Completion:
    """A trajectory, packed, and the calls that store and acknowledge it."""

    stored: StoredPayload
    job: WriteAndRun


class Completions:
    """`TransferQueue.complete` and `complete_many` of one run."""

    def __init__(self, connection: Connection, keys: Keys, payloads: Payloads, compression: str) -> None:
        self._connection = connection
        self._keys = keys
        self._payloads = payloads
        self._compression = compression

    async def complete(self, lease: Lease, trajectory: Trajectory) -> None:
        (refusal,) = await self._acknowledge([self._completion(lease, trajectory)])
        if refusal is not None:
            raise refusal

    async def complete_many(self, finished: Sequence[tuple[Lease, Trajectory]]) -> list[Refusal | None]:
        check_leases([lease for lease, _ in finished])
        refusals: list[Refusal | None] = [None] * len(finished)
        shares = self._shares(finished, refusals)

        async def send() -> None:
            for places, completions in shares:
                for place, refusal in zip(places, await self._acknowledge(completions), strict=True):
                    refusals[place] = refusal

        await gather_or_cancel([send() for _ in range(SHARES_AT_ONCE)])
        return refusals

    def _shares(
        self, finished: Sequence[tuple[Lease, Trajectory]], refusals: list[Refusal | None]
    ) -> Iterator[tuple[list[int], list[_Completion]]]:
        """Places in `finished` and what is sent for them in one round trip, packed when it is asked for: at most
        `SHARE_BYTES` of payloads and `SHARE_EPISODES`, or one. What cannot be packed is entered in `refusals`."""
        places: list[int] = []
        completions: list[_Completion] = []
        size = 0
        for place, (lease, trajectory) in enumerate(finished):
            try:
                one = self._completion(lease, trajectory)
            except BadPayload as refusal:
                refusals[place] = refusal
                continue
            if places and (size + one.stored.size > SHARE_BYTES or len(places) == SHARE_EPISODES):
                yield places, completions
                places, completions, size = [], [], 0
            places.append(place)
            completions.append(one)
            size += one.stored.size
        if places:
            yield places, completions

    def _completion(self, lease: Lease, trajectory: Trajectory) -> _Completion:
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
            nonce,
        )
        outcome = pack_plain(outcome_to_plain(trajectory.outcome), "outcome") if result.reward is None else ""
        job = self._connection.write_and_run_job(
            self._payloads.writes(stored, result.packed),
            *("complete", self._keys.index, lease.episode_id, lease.fence, *numbers, outcome),
            keys=keys,
        )
        return _Completion(stored, job)

    async def _acknowledge(self, completions: Sequence[_Completion]) -> list[Refusal | None]:
        """Store and acknowledge in one round trip; the payloads of refused ones are deleted, and of those whose episode
        another completion under the same fence has ended."""
        if self._connection.spreads:
            await self._connection.script("reserve", self._keys.index, *(one.stored.row for one in completions))
        await self._connection.run_jobs([one.job for one in completions])
        gone = [one.stored for one in completions if one.job.refusal is not None or not one.job.script.reply]
        if gone:
            await self._payloads.delete(gone)
        refusals: list[Refusal | None] = []
        for one in completions:
            if one.job.refusal is not None and not isinstance(one.job.refusal, Refusal):
                raise one.job.refusal
            refusals.append(one.job.refusal)
        return refusals
