"""The process groups of one version's broadcast: one for each rank of the trainer that sends, with the workers of the
servers that are ready.

Each broadcast has separate groups. They touch nothing global, so a broken one does not affect the groups that its
processes have otherwise. Bytes go from a group's rank 0 to all others, a bucket at a time, in the stream's order:

    gloo    host memory ──────────────────────────────► host memory
    nccl    host memory ─► sender's GPU ─► worker's GPU ─► host memory      a bucket under way is on each GPU
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist

from penstock.weight_sync.broadcast.nccl import Nccl, NcclError, until_idle
from penstock.weight_sync.broadcast.offer import GLOO, Member


def open_store(listener: socket.socket, member: Member) -> dist.TCPStore:
    """The trainer's; it takes `listener` over, so that it is reached where the trainer chose to listen."""
    host, port = listener.getsockname()[:2]
    descriptor = listener.detach()
    return dist.TCPStore(host, port, None, True, member.silence, wait_for_workers=False, master_listen_fd=descriptor)


def find_store(host: str, member: Member) -> dist.TCPStore:
    """A worker's. Raises `RuntimeError` where no peer answers."""
    return dist.TCPStore(host, member.port, None, False, member.silence, wait_for_workers=False)


class Transfer(Protocol):
    """A bucket under way."""

    def wait(self) -> object:
        """Until it is there. Raises `RuntimeError` where a member is gone or silent."""


class BroadcastGroup(ABC):
    """The interface of groups of all wires. Forming one waits until all members are there; `RuntimeError` where one is
    not.
    """

    def __init__(self, store: dist.TCPStore, member: Member) -> None:
        self._store = dist.PrefixStore(member.name, store)
        self._member = member

    @abstractmethod
    def begin(self, bucket: torch.Tensor) -> Transfer:
        """`bucket` [bytes], uint8, from rank 0 to all others; it must not change before its ``wait``."""

    @abstractmethod
    def close(self) -> None:
        """Leave: others that wait for this member get an error, after `silence_s` at the latest."""

    def say_done(self) -> None:
        """This worker has all bytes."""
        self._store.set(f"done/{self._member.rank}", "1")

    def count_done(self) -> int:
        """Return the number of workers that have all bytes; waits for the others, `silence_s` in all."""
        done, give_up_at = 0, time.monotonic() + self._member.silence_s
        for rank in range(1, self._member.size):
            with contextlib.suppress(RuntimeError):
                left_s = max(0.01, give_up_at - time.monotonic())
                self._store.wait([f"done/{rank}"], timedelta(seconds=left_s))
                done += 1
        return done


def join_groups(
    store: dist.TCPStore, members: Iterable[tuple[int, Member]], host: str, device: torch.device | None
) -> dict[int, BroadcastGroup]:
    """The groups of one member of a broadcast, by their wire, one after the other. `members`: its place in the group of
    each sending rank, asked for when the group before is formed; `host`: this machine's address there; `device`: whose
    memory NCCL moves.

    Raises `RuntimeError`, `OSError`; it is in none of them then.
    """
    groups: dict[int, BroadcastGroup] = {}
    stream: NcclStream | None = None
    try:
        for sender, member in members:
            if stream is None and member.wire != GLOO:
                stream = NcclStream(device or torch.device("cuda" if torch.cuda.is_available() else "cpu", 0))
            try:
                groups[sender] = NcclGroup(store, member, stream) if stream else GlooGroup(store, member, host)
            except RuntimeError as error:
                raise RuntimeError(
                    f"the group in which rank {member.name.rpartition('/')[2]} of the trainer sends is not complete: a "
                    f"member of it is gone, or does not reach the others at rollout.weights_host: {error}"
                ) from error
    except BaseException:
        leave_groups(groups.values())
        raise
    return groups


def leave_groups(groups: Iterable[BroadcastGroup]) -> None:
    """Close all at once: what NCCL frees for one waits for the device, on which another may wait for its member."""
    closing = [threading.Thread(target=group.close, name="leave a broadcast") for group in groups]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()


class GlooGroup(BroadcastGroup):
    """Over TCP, between the memories of hosts."""

    def __init__(self, store: dist.TCPStore, member: Member, host: str) -> None:
        super().__init__(store, member)
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = member.silence
        self._group: Any = dist.ProcessGroupGloo(self._store, member.rank, member.size, options)
        self._options = dist.BroadcastOptions()
        self._options.rootRank = 0

    def begin(self, bucket: torch.Tensor) -> Any:
        return self._group.broadcast([bucket], self._options)

    def close(self) -> None:
        self._group.abort()


class NcclGroup(BroadcastGroup):
    """Between GPUs: NVLink, InfiniBand, or what else NCCL finds. One thread uses it."""

    def __init__(self, store: dist.TCPStore, member: Member, stream: NcclStream) -> None:
        super().__init__(store, member)
        torch.cuda.set_device(stream.device)  # of this thread
        self._stream = stream
        nccl = _library()
        if member.rank == 0:
            self._store.set("nccl", nccl.unique_id().hex())
        unique_id = bytes.fromhex(self._store.get("nccl").decode())
        # A member that never comes is noticed here: NCCL would take up to its own deadline.
        self._store.set(f"here/{member.rank}", "1")
        self._store.wait([f"here/{rank}" for rank in range(member.size)], member.silence)
        self._communicator = nccl.join(member.size, unique_id, member.rank, member.silence_s)

    def begin(self, bucket: torch.Tensor) -> Transfer:
        """See `BroadcastGroup.begin`. Returns when it is posted on the stream: what begins later, in any group of the
        stream, comes after it there. NCCL posts it from a separate thread."""
        with torch.cuda.stream(self._stream.stream):
            # Memory of another stream may be in use by what is queued there, and again as soon as `buffer` is gone.
            buffer = torch.empty(len(bucket), dtype=torch.uint8, device=self._stream.device)
            if self._member.rank == 0:
                buffer.copy_(bucket, non_blocking=True)
        self._communicator.broadcast(buffer.data_ptr(), len(bucket), self._stream.stream.cuda_stream)
        self._wait_while(lambda: self._communicator.busy)
        received = torch.cuda.Event()
        received.record(self._stream.stream)
        return _NcclTransfer(self, bucket, buffer, received)

    def finish(self, transfer: _NcclTransfer) -> None:
        """See `Transfer.wait`."""
        self._wait_while(lambda: self._communicator.busy or not transfer.received.query())
        if self._member.rank:
            # The copy has no deadline, so it begins when the bytes are there.
            with torch.cuda.stream(self._stream.stream):
                transfer.bucket.copy_(transfer.buffer)

    def close(self) -> None:
        self._communicator.abort()

    def _wait_while(self, busy: Callable[[], bool]) -> None:
        until_idle(busy, self._member.silence_s)


class NcclStream:
    """The CUDA stream of all groups of one member: communicators of one device that run side by side may wait for each
    other without end, so their broadcasts are posted on it in one order, which is that of all members.

    A later broadcast takes it over, and with it the memory that torch keeps for each stream.
    """

    _idle: ClassVar[dict[torch.device, list[torch.cuda.Stream]]] = {}

    def __init__(self, device: torch.device) -> None:
        idle = self._idle.setdefault(device, [])
        self.device, self.stream = device, idle.pop() if idle else torch.cuda.Stream(device)
        weakref.finalize(self, _keep_idle, idle, self.stream)


def _keep_idle(idle: list[torch.cuda.Stream], stream: torch.cuda.Stream) -> None:
    """Keep a stream whose broadcast is over, unless something that cannot be ended is still on it."""
    if stream.query():
        idle.append(stream)


@dataclass(frozen=True, slots=True)
class _NcclTransfer:
    group: NcclGroup
    bucket: torch.Tensor
    buffer: torch.Tensor
    """On the device."""
    received: torch.cuda.Event

    def wait(self) -> None:
        self.group.finish(self)


def _library() -> Nccl:
    try:
        return Nccl.load()
    except OSError as error:
        raise NcclError(f"NCCL cannot be loaded: {error}") from error
