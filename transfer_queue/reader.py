"""Reading trajectories back: whole or by field, from Redis or, once spilled, from the batch log."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from penstock.transfer_queue.batch_log import BatchLog
from penstock.transfer_queue.codec import KIND_TRAJECTORY, decode_trajectory, get_fields, values_of, wanted_fields
from penstock.transfer_queue.packing import HEAD_GUESS, Head, head_length, parse_head
from penstock.transfer_queue.payloads import Cut, Payloads, Stored
from penstock.transfer_queue.queue import BadPayload, QueueError
from penstock.transfer_queue.trajectory import FieldValues, Trajectory

SPILLED = -1
"""Size that ``locate.lua`` gives a payload in the batch log."""

Value = TypeVar("Value")
Locate = Callable[[Sequence[str]], Awaitable[list[Stored]]]
"""Where the payloads of episodes are; an empty name where there is none."""


class Reader:
    """`TransferQueue.read`, `get` and the copy that `spill` makes."""

    def __init__(self, payloads: Payloads, locate: Locate, batch_log: BatchLog | None) -> None:
        self._payloads = payloads
        self._locate = locate
        self._batch_log = batch_log

    async def read(self, episode_ids: Sequence[str]) -> list[Trajectory]:
        blobs = await self.blobs(episode_ids)
        return [_in_payload(episode_id, decode_trajectory, blobs[episode_id]) for episode_id in episode_ids]

    async def get(
        self, episode_ids: Sequence[str], fields: Sequence[str], start: int, stop: int | None
    ) -> list[FieldValues]:
        stored, spilled = await self._split(episode_ids)
        logged = await self._from_log(spilled)
        found = {name: _in_payload(name, get_fields, blob, fields, start, stop) for name, blob in logged.items()}
        found |= await self._cut_fields(stored, fields, start, stop)
        return [found[episode_id] for episode_id in episode_ids]

    async def blobs(self, episode_ids: Sequence[str]) -> dict[str, bytes]:
        """Packed trajectories. Raises `BadPayload` for one that is not there."""
        stored, spilled = await self._split(episode_ids)
        fetched = await self._payloads.fetch(list(stored.values()))
        blobs = {name: _present(name, blob) for name, blob in zip(stored, fetched, strict=True)}
        return {**blobs, **await self._from_log(spilled)}

    async def held(self, episode_ids: Sequence[str]) -> dict[str, bytes]:
        """Packed trajectories of those that are not spilled yet; others are passed over."""
        rows = zip(episode_ids, await self._locate(episode_ids), strict=True)
        here = {name: stored for name, stored in rows if stored.size > 0}
        fetched = await self._payloads.fetch(list(here.values()))
        return {name: _present(name, blob) for name, blob in zip(here, fetched, strict=True)}

    async def _split(self, episode_ids: Sequence[str]) -> tuple[dict[str, Stored], list[str]]:
        stored: dict[str, Stored] = {}
        spilled: list[str] = []
        for episode_id, found in zip(episode_ids, await self._locate(episode_ids), strict=True):
            if not found.name:
                raise BadPayload(f"{episode_id}: no payload; not completed, or its step is committed")
            if found.size == SPILLED:
                spilled.append(episode_id)
            else:
                stored[episode_id] = found
        return stored, spilled

    async def _from_log(self, episode_ids: Sequence[str]) -> Mapping[str, bytes]:
        if not episode_ids:
            return {}
        if self._batch_log is None:
            raise QueueError(
                f"{episode_ids[0]} was spilled to the trainer's batch log; connect with its folder to read it"
            )
        return await asyncio.to_thread(self._batch_log.read, None, episode_ids)

    async def _cut_fields(
        self, stored: Mapping[str, Stored], fields: Sequence[str], start: int, stop: int | None
    ) -> dict[str, FieldValues]:
        heads = await self._heads(stored)
        tables = {name: _in_payload(name, wanted_fields, head, fields) for name, head in heads.items()}
        wanted = [(name, field) for name, table in tables.items() for field in table]
        cuts = [Cut(stored[name], *heads[name].fields[field].byte_range(start, stop)) for name, field in wanted]
        arrays: dict[str, dict[str, bytes]] = {name: {} for name in stored}
        for (name, field), raw in zip(wanted, await self._payloads.cut(cuts), strict=True):
            arrays[name][field] = raw
        return {
            name: _in_payload(name, values_of, head, arrays[name], fields, start, stop) for name, head in heads.items()
        }

    async def _heads(self, stored: Mapping[str, Stored]) -> dict[str, Head]:
        first = await self._payloads.cut([Cut(one, 0, min(HEAD_GUESS, one.size)) for one in stored.values()])
        prefixes = {name: _present(name, prefix or None) for name, prefix in zip(stored, first, strict=True)}
        lengths = {name: _in_payload(name, head_length, prefix) for name, prefix in prefixes.items()}
        long = {name: length for name, length in lengths.items() if length > len(prefixes[name])}
        again = await self._payloads.cut([Cut(stored[name], 0, length) for name, length in long.items()])
        prefixes |= dict(zip(long, again, strict=True))
        return {name: _in_payload(name, parse_head, prefix, KIND_TRAJECTORY) for name, prefix in prefixes.items()}


def _present(name: str, blob: bytes | None) -> bytes:
    if blob is None:
        raise BadPayload(f"{name}: its payload is missing from Redis, or lacks bytes")
    return blob


def _in_payload(episode_id: str, decode: Callable[..., Value], *args: Any) -> Value:
    """`decode(*args)`; what is damaged is named with its episode."""
    try:
        return decode(*args)
    except BadPayload as error:
        raise BadPayload(f"{episode_id}: {error}") from error
