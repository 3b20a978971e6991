"""Packed trajectories in Redis, in chunks, so that no single command blocks Redis for long.

    penstock:payload:RUN:EPISODE@FENCE.NONCE        first chunk
    penstock:payload:RUN:EPISODE@FENCE.NONCE/1 …    the others, each `CHUNK_BYTES` long except the last

Each chunk is its own key: chunks spread over a cluster and are freed one by one.

`PayloadReader` reads trajectories, whole or by field, from Redis or, once spilled, from the archive.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.common import cancel_and_wait, huge_area
from penstock.transfer_queue.codec.packing import (
    HEAD_GUESS,
    Packed,
    PayloadHead,
    head_length,
    parse_head,
)
from penstock.transfer_queue.codec.trajectories import (
    KIND_TRAJECTORY,
    decode_trajectory,
    fields_of,
    values_of,
    wanted_fields,
)
from penstock.transfer_queue.errors import BadPayload, QueueError
from penstock.transfer_queue.metrics import CHUNK_BYTES
from penstock.transfer_queue.redis.client import Connection
from penstock.transfer_queue.redis.keys import Keys
from penstock.transfer_queue.types import FieldValues, Trajectory

if TYPE_CHECKING:
    from penstock.transfer_queue.archive.archive import Archive

PIPELINE_BYTES = 512 << 10
"""Replies of one round trip: little enough for Redis's caches, and for the caller to start unpacking early."""
UNACKNOWLEDGED_S = 3600
"""Longer than any call that stores a payload may take."""


@dataclass(frozen=True, slots=True)
class StoredPayload:
    """A payload referenced by the index."""

    name: str
    """``EPISODE@FENCE.NONCE``"""
    size: int
    """Bytes of all its pieces."""

    @property
    def row(self) -> str:
        """The member of the sets `garbage` and `reserved` that stands for it."""
        return f"{self.name} {self.size}"


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes ``start:stop`` of a payload."""

    stored: StoredPayload
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Piece:
    command: list[Any]
    size: int
    """Bytes of its reply."""


class Payloads:
    """All payloads of one run."""

    def __init__(self, connection: Connection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys

    def keys(self, stored: StoredPayload) -> list[str]:
        count = max(1, -(-stored.size // CHUNK_BYTES))
        return [self._keys.payload(stored.name, piece) for piece in range(count)]

    def writes(self, stored: StoredPayload, packed: Packed) -> list[list[Any]]:
        """Commands that store it. NX: a repeat of the call never replaces an acknowledged payload.

        It expires unless script ``complete`` acknowledges it, so that a writer that dies leaves nothing behind. On a
        cluster, where no script can reach it, it is reserved before it is written (`Completions`), and swept.
        """
        how = ["NX"] if self._connection.spreads else ["NX", "EX", str(UNACKNOWLEDGED_S)]
        if packed.size <= CHUNK_BYTES:
            return [["SET", self._keys.payload(stored.name), packed, *how]]
        view = memoryview(packed.joined())
        cuts = range(0, packed.size, CHUNK_BYTES)
        return [
            ["SET", key, view[at : at + CHUNK_BYTES], *how] for key, at in zip(self.keys(stored), cuts, strict=True)
        ]

    async def fetch(self, stored_by_name: Mapping[str, StoredPayload]) -> AsyncGenerator[tuple[str, bytes]]:
        """Episodes and their whole payloads, one by one in the order given. Close it (`aclosing`).

        Redis answers the next round trip while the caller unpacks a payload. Raises `BadPayload` if one is missing or
        truncated.
        """
        async with aclosing(
            self._each([ByteRange(stored, 0, stored.size) for stored in stored_by_name.values()])
        ) as blobs:
            rest = iter(stored_by_name.items())
            async for blob in blobs:
                name, stored = next(rest)
                yield name, _present(name, blob if len(blob) == stored.size else None)

    async def cut(self, cuts: Sequence[ByteRange]) -> list[bytes]:
        """Ranges of payloads in the order given, shorter if the store holds less."""
        async with aclosing(self._each(cuts)) as blobs:
            return [blob async for blob in blobs]

    async def _each(self, cuts: Sequence[ByteRange]) -> AsyncGenerator[bytes]:
        groups = [list(self._pieces(cut)) for cut in cuts]
        arrived: deque[bytes | None] = deque()
        async with aclosing(self._round_trips([piece for group in groups for piece in group])) as round_trips:
            for group in groups:
                while len(arrived) < len(group):
                    arrived += await anext(round_trips)
                yield _join([arrived.popleft() for _ in group])

    async def _round_trips(self, pieces: Sequence[_Piece]) -> AsyncGenerator[list[bytes | None]]:
        """The replies of each round trip in order; the next one is in flight while the caller processes them."""
        under_way: deque[asyncio.Task[list[Any]]] = deque()
        try:
            for share in _shares(pieces):
                under_way.append(asyncio.create_task(self._connection.many([piece.command for piece in share])))
                # One round trip is in flight while the caller processes the replies of another.
                if len(under_way) > 1:
                    yield await under_way.popleft()
            while under_way:
                yield await under_way.popleft()
        finally:
            await cancel_and_wait(under_way)

    def _pieces(self, cut: ByteRange) -> Iterator[_Piece]:
        keys, end = self.keys(cut.stored), min(cut.stop, cut.stored.size)
        for number in range(cut.start // CHUNK_BYTES, -(-end // CHUNK_BYTES)):
            start = max(cut.start - number * CHUNK_BYTES, 0)
            stop = min(end - number * CHUNK_BYTES, CHUNK_BYTES)
            whole = start == 0 and stop == min(CHUNK_BYTES, cut.stored.size - number * CHUNK_BYTES)
            command = ["GET", keys[number]] if whole else ["GETRANGE", keys[number], start, stop - 1]
            yield _Piece(command, stop - start)

    async def delete(self, gone: Sequence[StoredPayload]) -> None:
        """Delete payloads. Their names are never reused, so a repeat is harmless."""
        keys = [key for stored in gone for key in self.keys(stored)]
        if self._connection.spreads:
            await self._connection.many([["UNLINK", key] for key in keys])
        elif keys:
            await self._connection.command("UNLINK", *keys)


def _shares(pieces: Sequence[_Piece]) -> Iterator[Sequence[_Piece]]:
    """Yields the pieces of each round trip: as many as `PIPELINE_BYTES` allow, at least one."""
    first = size = 0
    for place, piece in enumerate(pieces):
        if place > first and size + piece.size > PIPELINE_BYTES:
            yield pieces[first:place]
            first, size = place, 0
        size += piece.size
    if pieces:
        yield pieces[first:]


def _join(parts: Sequence[bytes | None]) -> Any:
    if len(parts) < 2:
        return (parts[0] if parts else None) or b""
    whole, at = memoryview(huge_area(sum(len(part or b"") for part in parts))), 0
    for part in filter(None, parts):
        whole[at : at + len(part)] = part
        at += len(part)
    return whole[:at].toreadonly()


Value = TypeVar("Value")
Locate = Callable[[Sequence[str]], Awaitable[list[StoredPayload]]]
"""Returns the payloads of episodes; the name is empty if an episode has none."""


class PayloadReader:
    """`TransferQueue.read` and `get`."""

    def __init__(self, payloads: Payloads, locate: Locate, archive: Archive | None) -> None:
        self._payloads = payloads
        self._locate = locate
        self._archive = archive

    async def read(self, episode_ids: Sequence[str]) -> list[Trajectory]:
        """Raises `BadPayload` if one is missing."""
        stored, spilled = await self._split(episode_ids)
        read: dict[str, Trajectory] = {}
        async with aclosing(self._payloads.fetch(stored)) as blobs:
            async for name, blob in blobs:
                read[name] = _in_payload(name, decode_trajectory, blob)
        read |= await self._from_archive(spilled)
        return [read[episode_id] for episode_id in episode_ids]

    async def get(self, episode_ids: Sequence[str], fields: Sequence[str]) -> list[FieldValues]:
        stored, spilled = await self._split(episode_ids)
        values = {name: fields_of(one, fields) for name, one in (await self._from_archive(spilled)).items()}
        heads = await self._heads(stored)
        tables = {name: _in_payload(name, wanted_fields, head, fields) for name, head in heads.items()}
        pairs = [(name, field) for name, table in tables.items() for field in table]
        cuts = [ByteRange(stored[name], *heads[name].fields[field].byte_range) for name, field in pairs]
        arrays: dict[str, dict[str, bytes]] = {name: {} for name in stored}
        for (name, field), raw in zip(pairs, await self._payloads.cut(cuts), strict=True):
            arrays[name][field] = raw
        for name, head in heads.items():
            values[name] = _in_payload(name, values_of, head, arrays[name], fields)
        return [values[episode_id] for episode_id in episode_ids]

    async def _split(self, episode_ids: Sequence[str]) -> tuple[dict[str, StoredPayload], dict[int, list[str]]]:
        """(payloads in Redis, episodes in the archive by step)"""
        stored: dict[str, StoredPayload] = {}
        spilled: dict[int, list[str]] = {}
        for episode_id, location in zip(episode_ids, await self._locate(episode_ids), strict=True):
            if not location.name:
                raise BadPayload(f"{episode_id}: no payload; not completed, or its step is committed")
            if location.size == -1:  # by script ``locate``: a payload in the archive, and its step
                spilled.setdefault(int(location.name), []).append(episode_id)
            else:
                stored[episode_id] = location
        return stored, spilled

    async def _from_archive(self, spilled: Mapping[int, Sequence[str]]) -> dict[str, Trajectory]:
        read: dict[str, Trajectory] = {}
        for step, episode_ids in spilled.items():
            if self._archive is None:
                raise QueueError(f"{episode_ids[0]} was spilled to the run's archive; connect with it to read it")
            read |= await asyncio.to_thread(self._archive.read, step, episode_ids)
        return read

    async def _heads(self, stored: Mapping[str, StoredPayload]) -> dict[str, PayloadHead]:
        first = await self._payloads.cut([ByteRange(one, 0, min(HEAD_GUESS, one.size)) for one in stored.values()])
        prefixes = {name: _present(name, prefix or None) for name, prefix in zip(stored, first, strict=True)}
        lengths = {name: _in_payload(name, head_length, prefix) for name, prefix in prefixes.items()}
        long = {name: length for name, length in lengths.items() if length > len(prefixes[name])}
        again = await self._payloads.cut([ByteRange(stored[name], 0, length) for name, length in long.items()])
        prefixes |= dict(zip(long, again, strict=True))
        return {name: _in_payload(name, parse_head, prefix, KIND_TRAJECTORY) for name, prefix in prefixes.items()}


def _present(name: str, blob: bytes | None) -> bytes:
    if blob is None:
        raise BadPayload(f"{name}: its payload is missing from Redis, or lacks bytes")
    return blob


def _in_payload(episode_id: str, decode: Callable[..., Value], *args: Any) -> Value:
    """`decode(*args)`, with the episode added to a `BadPayload`."""
    try:
        return decode(*args)
    except BadPayload as error:
        raise BadPayload(f"{episode_id}: {error}") from error
