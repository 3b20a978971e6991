"""Rank 0 sends one version: checksums, where asked for its file, and the servers that are ready, in one pass.

    bucket k      to the group ─────────────────┐
                  checksums, file ──────────────┴─ bucket k + 1, which the source has fetched meanwhile

The checksums are needed whatever happens: a member that is lost, or is too slow for the others, ends the broadcast and
not the pass. Who has no place in the group, or lost it, takes the version's file.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from penstock.common import listening_host, reachable_host
from penstock.weight_sync.broadcast.group import BroadcastGroup, join_group, open_store
from penstock.weight_sync.broadcast.memory import stream_header
from penstock.weight_sync.broadcast.offer import StreamDigests
from penstock.weight_sync.broadcast.seats import Sending
from penstock.weight_sync.broadcast.source import WeightSource
from penstock.weight_sync.files.file_format import Written, new_file, raw_bytes
from penstock.weight_sync.manifest import TensorEntry

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Streamed:
    """One version's pass."""

    tensors: tuple[TensorEntry, ...]
    written: Written
    """What the version's file is, or will be once it is written."""
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
) -> Streamed:
    """Blocks. Raises `NoSpace` where the file has no room, `Superseded`, `RuntimeError` where a rank is gone.

    `durable`: a file that is written survives a power cut when this returns. Whatever it raises, there is no
    file under `path` that was not there before.
    """
    tensors, digests = source.tensors, StreamDigests(source.tensors)
    header = stream_header(tensors)
    size, whole = len(header) + source.nbytes, xxhash.xxh3_64(header)
    opened = new_file(path, size, durable=durable) if write else contextlib.nullcontext()
    with contextlib.closing(_Members(sending)) as members, opened as file:
        if file is not None:
            file.write(header)
        for bucket in source.buckets(version, bucket_bytes):
            members.begin(bucket)
            piece = raw_bytes(bucket)
            digests.update(piece)
            whole.update(piece)
            if file is not None:
                file.write(piece)
            members.wait()
        entries, done = digests.entries(), members.count_done()
    return Streamed(entries, Written(path, size, whole.hexdigest()), done)


class _Members:
    """The group of a broadcast, as long as all of its members are there."""

    def __init__(self, sending: Sending | None) -> None:
        self._sending = sending
        self._group: BroadcastGroup | None = None
        self._work: Any = None
        self._give_up_at = 0.0
        if sending is not None and sending.listener is not None:
            self._give_up_at = time.monotonic() + sending.deadline_s
            self._attempt(self._form)

    def begin(self, bucket: torch.Tensor) -> None:
        """`bucket` must not change before `wait`."""
        self._attempt(lambda: self._begin(bucket))

    def wait(self) -> None:
        self._attempt(self._end)

    def count_done(self) -> int:
        """How many workers have all bytes."""
        return self._group.count_done() if self._group is not None else 0

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
        if self._sending is not None and self._sending.listener is not None:
            self._sending.listener.close()

    def _form(self) -> None:
        assert self._sending is not None
        assert self._sending.listener is not None
        store = open_store(self._sending.listener, self._sending.member)
        here = listening_host(reachable_host(self._sending.host))  # bound, and announced to the other members
        # NCCL moves the memory of rank 0's GPU, which is the first of its machine.
        self._group = join_group(store, self._sending.member, here, None)

    def _begin(self, bucket: torch.Tensor) -> None:
        if self._group is None or self._sending is None:
            return
        if self._sending.closed.is_set():
            raise RuntimeError("the trainer stops")
        if time.monotonic() > self._give_up_at:
            raise RuntimeError(f"not done in {self._sending.deadline_s:.0f} s")
        self._work = self._group.begin(bucket)

    def _end(self) -> None:
        if self._work is not None:
            work, self._work = self._work, None
            work.wait()

    def _attempt(self, step: Callable[[], None]) -> None:
        """What goes wrong with a member costs this broadcast: its members take the file."""
        try:
            step()
        except (RuntimeError, OSError) as error:
            assert self._sending is not None
            logger.warning("broadcast %s ended early, its servers take the file: %s", self._sending.name, error)
            if self._group is not None:
                self._group.close()
                self._group = None
