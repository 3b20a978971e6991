"""Rank 0's pass over one version: checksums, where asked for its file, and the servers that are ready.

    bucket k + 1   from the ranks to rank 0 and the members of the broadcast ─┐
    bucket k       checksums, file ───────────────────────────────────────────┴─ bucket k + 2

The checksums are needed whatever happens: a member that is lost, or is too slow for the others, ends the broadcast and
not the pass. Who has no place in the group, or lost it, takes the version's file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from penstock.weight_sync.broadcast.memory import stream_header
from penstock.weight_sync.broadcast.offer import StreamDigests
from penstock.weight_sync.broadcast.seats import Sending
from penstock.weight_sync.broadcast.senders import Members
from penstock.weight_sync.broadcast.source import WeightSource
from penstock.weight_sync.files.file_format import WrittenFile, new_file, raw_bytes
from penstock.weight_sync.manifest import TensorEntry


@dataclass(frozen=True, slots=True)
class StreamedVersion:
    """One version's pass."""

    tensors: tuple[TensorEntry, ...]
    written: WrittenFile
    """The version's file, written or being written."""
    done: int
    """Workers that have all bytes."""


def stream_version(
    source: WeightSource,
    version: int,
    path: Path,
    *,
    write: bool,
    bucket_bytes: int,
    sending: Sending | None = None,
    durable: bool = False,
) -> StreamedVersion:
    """Blocks. Raises `NoSpace` where the file has no room, `Superseded`, `RuntimeError` where a rank is gone.

    `durable`: a file that is written survives a power cut when this returns. If it raises, `path` has no
    file that was not there before.
    """
    tensors, digests = source.tensors, StreamDigests(source.tensors)
    header = stream_header(tensors)
    size, whole = len(header) + source.nbytes, xxhash.xxh3_64(header)
    opened = new_file(path, size, durable=durable) if write else contextlib.nullcontext()
    with contextlib.closing(Members(sending, source.wire)) as members, opened as file, ThreadPoolExecutor(2) as beside:
        members.meet(source.device)
        if file is not None:
            file.write(header)
        # A stream that breaks off ends before its memory and its members are given up.
        with contextlib.closing(source.buckets(version, bucket_bytes, members)) as buckets:
            steps: list[Callable[[memoryview], object]] = [whole.update]
            if file is not None:
                steps.append(file.write)
            for bucket in buckets:
                piece = raw_bytes(bucket)
                others = [beside.submit(step, piece) for step in steps]
                digests.update(piece)
                for other in others:
                    other.result()
        entries, done = digests.entries(), members.count_done()
    return StreamedVersion(entries, WrittenFile(path, size, whole.hexdigest()), done)
