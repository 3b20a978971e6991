"""A process group for one round of one version: gloo, between the trainer (rank 0) and some servers.

It stands beside whatever groups its processes have and touches nothing global, so that a broken round takes nothing
with it. Bytes go from rank 0 to all, a bucket at a time, in the order of the file.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

BUCKET_BYTES = 64 << 20
"""What a round holds in memory, in the trainer and in each server."""
SILENCE_S = 10.0
"""A peer that takes or brings nothing for so long ends the round for those who wait for it."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A server's place in a round."""

    port: int
    """Of the group's store, at the trainer."""
    name: str
    rank: int
    """1 … size − 1; the trainer is 0."""
    size: int
    bucket_bytes: int
    silence_s: float = SILENCE_S

    @property
    def silence(self) -> timedelta:
        return timedelta(seconds=self.silence_s)


def open_store(listener: socket.socket, seat: Seat) -> dist.TCPStore:
    """The trainer's; it takes `listener` over, so that it is reached where the trainer chose to listen."""
    host, port = listener.getsockname()[:2]
    descriptor = listener.detach()
    return dist.TCPStore(host, port, None, True, seat.silence, wait_for_workers=False, master_listen_fd=descriptor)


def find_store(host: str, seat: Seat) -> dist.TCPStore:
    """A server's. Raises `RuntimeError` where nobody answers."""
    return dist.TCPStore(host, seat.port, None, False, seat.silence, wait_for_workers=False)


class RoundGroup:
    """Forming it waits until all members are there. Raises `RuntimeError` here and in `broadcast` when one is not."""

    def __init__(self, store: dist.TCPStore, seat: Seat, host: str) -> None:
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = seat.silence
        self._store = dist.PrefixStore(seat.name, store)
        self._seat = seat
        self._group: Any = dist.ProcessGroupGloo(self._store, seat.rank, seat.size, options)
        self._options = dist.BroadcastOptions()
        self._options.rootRank = 0

    def broadcast(self, bucket: torch.Tensor) -> None:
        """`bucket` [bytes], uint8, from rank 0 to all others."""
        self._group.broadcast([bucket], self._options).wait()

    def say_done(self) -> None:
        """A server has all bytes."""
        self._store.set(f"done/{self._seat.rank}", "1")

    def count_done(self) -> int:
        """How many servers have all; waits for the others, `silence_s` in all."""
        done, give_up_at = 0, time.monotonic() + self._seat.silence_s
        for rank in range(1, self._seat.size):
            with contextlib.suppress(RuntimeError):
                left_s = max(0.01, give_up_at - time.monotonic())
                self._store.wait([f"done/{rank}"], timedelta(seconds=left_s))
                done += 1
        return done

    def close(self) -> None:
        """Leave: others that wait for this member get an error at once."""
        self._group.abort()


def send_file(group: RoundGroup, file: BinaryIO, bucket_bytes: int, closed: threading.Event) -> None:
    """All of `file` to all members. Raises `RuntimeError` once `closed` is set."""
    buffer = torch.empty(bucket_bytes, dtype=torch.uint8)
    view = buffer.numpy().data
    while count := file.readinto(view):  # type: ignore[attr-defined]
        if closed.is_set():
            raise RuntimeError("the trainer stops")
        group.broadcast(buffer[:count])


def receive_file(group: RoundGroup, length: int, bucket_bytes: int) -> Iterator[memoryview]:
    """`length` bytes, in buckets; each is valid until the next is asked for."""
    buffer = torch.empty(min(bucket_bytes, length), dtype=torch.uint8)
    view = buffer.numpy().data
    for begin in range(0, length, bucket_bytes):
        count = min(bucket_bytes, length - begin)
        group.broadcast(buffer[:count])
        yield view[:count]
