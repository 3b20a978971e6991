"""The process group of one version's broadcast: the trainer's rank 0 and the workers of the servers that are ready.

Each broadcast has a gloo group of its own. It touches nothing global, so a broken one does not affect the groups that
its processes have otherwise. Bytes go from rank 0 to all others, a bucket at a time, in the stream's order.
"""

from __future__ import annotations

import contextlib
import socket
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from penstock.weight_sync.broadcast.offer import Member


def open_store(listener: socket.socket, member: Member) -> dist.TCPStore:
    """The trainer's; it takes `listener` over, so that it is reached where the trainer chose to listen."""
    host, port = listener.getsockname()[:2]
    descriptor = listener.detach()
    return dist.TCPStore(host, port, None, True, member.silence, wait_for_workers=False, master_listen_fd=descriptor)


def find_store(host: str, member: Member) -> dist.TCPStore:
    """A worker's. Raises `RuntimeError` where no peer answers."""
    return dist.TCPStore(host, member.port, None, False, member.silence, wait_for_workers=False)


class BroadcastGroup:
    """Forming it waits until all members are there. Raises `RuntimeError` here and later when one is not."""

    def __init__(self, store: dist.TCPStore, member: Member, host: str) -> None:
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = member.silence
        self._store = dist.PrefixStore(member.name, store)
        self._member = member
        self._group: Any = dist.ProcessGroupGloo(self._store, member.rank, member.size, options)
        self._options = dist.BroadcastOptions()
        self._options.rootRank = 0

    def begin(self, bucket: torch.Tensor) -> Any:
        """`bucket` [bytes], uint8, from rank 0 to all others, under way: its ``wait`` raises `RuntimeError`."""
        return self._group.broadcast([bucket], self._options)

    def say_done(self) -> None:
        """This worker has all bytes."""
        self._store.set(f"done/{self._member.rank}", "1")

    def count_done(self) -> int:
        """How many workers have all; waits for the others, `silence_s` in all."""
        done, give_up_at = 0, time.monotonic() + self._member.silence_s
        for rank in range(1, self._member.size):
            with contextlib.suppress(RuntimeError):
                left_s = max(0.01, give_up_at - time.monotonic())
                self._store.wait([f"done/{rank}"], timedelta(seconds=left_s))
                done += 1
        return done

    def close(self) -> None:
        """Leave: others that wait for this member get an error at once."""
        self._group.abort()
