"""A published file on its way to this machine: what has come of it, and whether it is what was announced."""

from __future__ import annotations

import json
from pathlib import Path

import xxhash
from safetensors import SafetensorError, safe_open

from penstock.weight_sync.chain import Link
from penstock.weight_sync.delta_file import read_delta
from penstock.weight_sync.errors import WeightsRefused
from penstock.weight_sync.manifest import checksum
from penstock.weight_sync.tensor_file import DELTA

PIECE_BYTES = 1 << 20


class Part:
    """A file on its way: what has come, and the checksum of it. `close` leaves what came for the next attempt."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._digest = xxhash.xxh3_64()
        self.length = 0
        self._file = path.open("a+b", buffering=0)
        self._file.seek(0)
        while piece := self._file.read(PIECE_BYTES):  # of an earlier life
            self._count(piece)

    def append(self, piece: bytes | memoryview) -> None:
        """Raises `OSError` where there is no room."""
        left = memoryview(piece)
        while left:
            left = left[self._file.write(left) :]
        self._count(piece)

    @property
    def xxh3(self) -> str:
        return self._digest.hexdigest()

    def close(self) -> None:
        self._file.close()

    def _count(self, piece: bytes | memoryview) -> None:
        self._digest.update(piece)
        self.length += len(piece)


def verify_whole(link: Link, part: Part) -> None:
    """Raises `WeightsRefused` and deletes the file where it is not what was announced."""
    if part.length != link.bytes or part.xxh3 != link.xxh3:
        try:
            raise WeightsRefused(f"version {link.version}: {link.place}: {_find_damage(part.path)}")
        finally:
            part.path.unlink(missing_ok=True)


def _find_damage(path: Path) -> str:
    """In words, with the tensor's name; files know the checksums of what they hold."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("penstock") != DELTA:
                wanted = json.loads(metadata["xxh3"])
                wrong = [name for name in wanted if checksum(file.get_tensor(name)) != wanted[name]]
                return f"tensor {wrong[0]!r} is not what was announced" if wrong else "its header is damaged"
        read_delta(path).verify()
    except WeightsRefused as error:
        return str(error)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        return f"its header is damaged: {error!r}"
    return "its header is damaged"
