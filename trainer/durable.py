"""Files that survive a power cut, and that say so: checksums, and the order in which things reach the disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash


def fingerprint(path: Path) -> dict[str, Any]:
    """{"bytes", "xxh3"} of a file."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        for block in _blocks(file):
            digest.update(block)
    return {"bytes": path.stat().st_size, "xxh3": digest.hexdigest()}


def fingerprints(folder: Path) -> dict[str, dict[str, Any]]:
    """Of all files below `folder`, by their path in it."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): fingerprint(path) for path in sorted(files)}


def sync(path: Path) -> None:
    """A file or a folder is on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """A folder with everything below it."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def _blocks(file: Any, size: int = 1 << 22) -> Iterator[bytes]:
    while block := file.read(size):
        yield block
