"""Packed trajectories in Redis: long ones in pieces, so that one command never holds Redis up for long.

    penstock:payload:RUN:EPISODE@FENCE        first piece
    penstock:payload:RUN:EPISODE@FENCE/1 …    the others, each `CHUNK_BYTES` long but the last

A piece is a key of its own: pieces spread over a cluster and are freed one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.transfer_queue.accounting import CHUNK_BYTES
from penstock.transfer_queue.connection import Connection
from penstock.transfer_queue.keys import Keys
from penstock.transfer_queue.packing import PREAMBLE, Packed, blob_length

PIPELINE_BYTES = 2 << 20
"""Replies of one round trip. With more, Redis builds them in memory that no cache holds, at half the speed."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A payload that the index names."""

    name: str
    """``EPISODE@FENCE``"""
    size: int
    """Bytes of all its pieces; 0 where unknown."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Bytes ``start:stop`` of a payload."""

    stored: Stored
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

    def keys(self, stored: Stored) -> list[str]:
        count = max(1, -(-stored.size // CHUNK_BYTES))
        return [self._keys.payload(stored.name, piece) for piece in range(count)]

    def writes(self, stored: Stored, packed: Packed) -> list[list[Any]]:
        """Commands that store it. NX: what was acknowledged first stays, whatever a repeat of the call carries."""
        if packed.size <= CHUNK_BYTES:
            return [["SET", self._keys.payload(stored.name), packed, "NX"]]
        view = memoryview(packed.joined())
        cuts = range(0, packed.size, CHUNK_BYTES)
        return [
            ["SET", key, view[at : at + CHUNK_BYTES], "NX"] for key, at in zip(self.keys(stored), cuts, strict=True)
        ]

    async def fetch(self, wanted: Sequence[Stored]) -> list[bytes | None]:
        """Whole payloads in the order asked; None for one that is gone or lacks bytes."""
        blobs = await self.cut([Cut(stored, 0, stored.size) for stored in wanted])
        return [blob if len(blob) == stored.size else None for blob, stored in zip(blobs, wanted, strict=True)]

    async def cut(self, cuts: Sequence[Cut]) -> list[bytes]:
        """Parts of payloads in the order asked, shorter where the store holds less."""
        pieces = [list(self._pieces(cut)) for cut in cuts]
        replies = iter(await self._fetch([piece for group in pieces for piece in group]))
        return [_join([next(replies) for _ in group]) for group in pieces]

    def _pieces(self, cut: Cut) -> Iterator[_Piece]:
        keys, end = self.keys(cut.stored), min(cut.stop, cut.stored.size)
        for number in range(cut.start // CHUNK_BYTES, -(-end // CHUNK_BYTES)):
            start = max(cut.start - number * CHUNK_BYTES, 0)
            stop = min(end - number * CHUNK_BYTES, CHUNK_BYTES)
            whole = start == 0 and stop == min(CHUNK_BYTES, cut.stored.size - number * CHUNK_BYTES)
            command = ["GET", keys[number]] if whole else ["GETRANGE", keys[number], start, stop - 1]
            yield _Piece(command, stop - start)

    async def _fetch(self, pieces: Sequence[_Piece]) -> list[bytes | None]:
        """Several pieces in each round trip, as many as `PIPELINE_BYTES` allow and at least one."""
        replies: list[bytes | None] = []
        while len(replies) < len(pieces):
            first = last = len(replies)
            size = 0
            while last < len(pieces) and (last == first or size + pieces[last].size <= PIPELINE_BYTES):
                size += pieces[last].size
                last += 1
            replies += await self._connection.many([piece.command for piece in pieces[first:last]])
        return replies

    async def delete(self, gone: Sequence[Stored]) -> None:
        """Free payloads whose names will never be used again, so that twice does no harm."""
        keys = [key for stored in await self.measured(gone) for key in self.keys(stored)]
        if self._connection.spreads:
            await self._connection.many([["UNLINK", key] for key in keys])
        elif keys:
            await self._connection.command("UNLINK", *keys)

    async def measured(self, stored: Sequence[Stored]) -> list[Stored]:
        """With the sizes that were unknown."""
        return [await self._measured(one) if one.size == 0 else one for one in stored]

    async def _measured(self, stored: Stored) -> Stored:
        """What a writer left behind that died before it told the index how much it wrote."""
        preamble = await self._connection.command("GETRANGE", self._keys.payload(stored.name), 0, PREAMBLE.size - 1)
        return Stored(stored.name, blob_length(preamble))


def _join(parts: Sequence[bytes | None]) -> bytes:
    if len(parts) == 1:
        return parts[0] or b""
    return b"".join(part or b"" for part in parts)
