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
from penstock.transfer_queue.packing import PREAMBLE, blob_length

PIPELINE_BYTES = 16 << 20
"""Replies that Redis and client hold at once."""


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


class Payloads:
    """All payloads of one run."""

    def __init__(self, connection: Connection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys

    def keys(self, stored: Stored) -> list[str]:
        count = max(1, -(-stored.size // CHUNK_BYTES))
        return [self._keys.payload(stored.name, piece) for piece in range(count)]

    def writes(self, stored: Stored, blob: bytes) -> list[list[Any]]:
        """Commands that store it. NX: what was acknowledged first stays, whatever a repeat of the call carries."""
        view = memoryview(blob) if len(blob) > CHUNK_BYTES else blob
        cuts = range(0, len(blob), CHUNK_BYTES)
        return [
            ["SET", key, view[at : at + CHUNK_BYTES], "NX"] for key, at in zip(self.keys(stored), cuts, strict=True)
        ]

    async def fetch(self, wanted: Sequence[Stored]) -> list[bytes | None]:
        """Whole payloads in the order asked; None for one that is gone or lacks bytes."""
        blobs = await self.cut([Cut(stored, 0, stored.size) for stored in wanted])
        return [blob if len(blob) == stored.size else None for blob, stored in zip(blobs, wanted, strict=True)]

    async def cut(self, cuts: Sequence[Cut]) -> list[bytes]:
        """Parts of payloads in the order asked, shorter where the store holds less."""
        commands = [list(self._commands(cut)) for cut in cuts]
        flat = [command for group in commands for command in group]
        replies = [reply async for reply in self._replies(flat)]
        parts = iter(replies)
        return [_join([next(parts) for _ in group]) for group in commands]

    def _commands(self, cut: Cut) -> Iterator[list[Any]]:
        keys = self.keys(cut.stored)
        for piece in range(cut.start // CHUNK_BYTES, -(-cut.stop // CHUNK_BYTES)):
            start = max(cut.start - piece * CHUNK_BYTES, 0)
            stop = min(cut.stop - piece * CHUNK_BYTES, CHUNK_BYTES)
            whole = start == 0 and stop == min(CHUNK_BYTES, cut.stored.size - piece * CHUNK_BYTES)
            yield ["GET", keys[piece]] if whole else ["GETRANGE", keys[piece], start, stop - 1]

    async def _replies(self, commands: Sequence[list[Any]]) -> Any:
        size = max(1, PIPELINE_BYTES // CHUNK_BYTES)
        for start in range(0, len(commands), size):
            for reply in await self._connection.many(commands[start : start + size]):
                yield reply

    async def delete(self, gone: Sequence[Stored]) -> None:
        """Free payloads whose names will never be used again, so that twice does no harm."""
        known = [await self._measured(stored) if stored.size == 0 else stored for stored in gone]
        keys = [key for stored in known for key in self.keys(stored)]
        if self._connection.spreads:
            await self._connection.many([["UNLINK", key] for key in keys])
        elif keys:
            await self._connection.command("UNLINK", *keys)

    async def _measured(self, stored: Stored) -> Stored:
        """What a writer left behind that died before it told the index how much it wrote."""
        preamble = await self._connection.command("GETRANGE", self._keys.payload(stored.name), 0, PREAMBLE.size - 1)
        return Stored(stored.name, blob_length(preamble))


def _join(parts: Sequence[bytes | None]) -> bytes:
    if len(parts) == 1:
        return parts[0] or b""
    return b"".join(part or b"" for part in parts)
