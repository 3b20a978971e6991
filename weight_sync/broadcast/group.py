"""The process groups of broadcasts: one for each rank of the trainer that sends, with the workers of the servers.

They stand from version to version while the same members take part (`Membership`), and all meet before each version.
They touch nothing global, so a broken one does not affect the groups that its processes have otherwise. Bytes go from
a group's rank 0 to all others, a bucket at a time, in the stream's order:

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
from penstock.weight_sync.broadcast.offer import FORMING_S, GLOO, Member

IDLE_S = 200.0
"""Groups that carried nothing for so long are formed again: some networks cut connections without traffic, load
balancers of clouds after 240 s."""
POLL_S = 0.002
"""Between two looks into the trainer's own store."""


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

    def __init__(self, store: dist.TCPStore, member: Member, stops: threading.Event | None = None) -> None:
        """`stops`: set when this process stops, which ends each wait for another member."""
        self._store = dist.PrefixStore(member.group, store)
        self._member, self._stops = member, stops
        self._met: list[str] = []
        """The store's keys of the last meeting."""
        # A member that never comes is noticed here: NCCL would take up to its own deadline.
        self.meet("formation")

    def meet(self, broadcast: str) -> None:
        """Blocks until all members begin `broadcast`. Raises `RuntimeError` where one does not in `silence_s`, or this
        process stops."""
        before, self._met = self._met, [f"begin/{broadcast}", f"begun/{broadcast}"]
        come, all_there = self._met
        if self._store.add(come, 1) == self._member.size:
            self._store.set(all_there, "1")
            for key in before:  # all members are here: no process waits for it
                self._store.delete_key(key)
        self._until_set(all_there, self._member.silence_s)

    @abstractmethod
    def begin(self, bucket: torch.Tensor) -> Transfer:
        """Begins to send `bucket` [bytes], uint8, from rank 0 to all others. It must not change before its ``wait``."""

    @abstractmethod
    def close(self) -> None:
        """Leave: others that wait for this member get an error, after `silence_s` at the latest."""

    def say_done(self, broadcast: str) -> None:
        """This worker has all bytes of `broadcast`."""
        self._store.set(f"done/{broadcast}/{self._member.rank}", "1")

    def count_done(self, broadcast: str) -> int:
        """Return the number of workers that have all bytes; waits for the others, `silence_s` in all."""
        done, give_up_at = 0, time.monotonic() + self._member.silence_s
        for rank in range(1, self._member.size):
            with contextlib.suppress(RuntimeError):
                left_s, key = max(0.01, give_up_at - time.monotonic()), f"done/{broadcast}/{rank}"
                self._until_set(key, left_s)
                self._store.delete_key(key)
                done += 1
        return done

    def _until_set(self, key: str, wait_s: float) -> None:
        """Raises `RuntimeError` after `wait_s`, or at once if this process stops."""
        if self._stops is None:
            self._store.wait([key], timedelta(seconds=wait_s))
            return
        give_up_at = time.monotonic() + wait_s
        while not self._store.check([key]):  # a `wait` of the store cannot be ended
            if self._stops.wait(POLL_S):
                raise RuntimeError("the trainer stops")
            if time.monotonic() > give_up_at:
                raise RuntimeError(f"a member of the group was silent for {wait_s:g} s")


class Membership:
    """One member's groups, which following broadcasts of the same members use again. One thread at a time uses it."""

    def __init__(self, stops: threading.Event | None = None) -> None:
        """`stops`: set when this process stops."""
        self._stops = stops
        self.groups: dict[int, BroadcastGroup] = {}
        """Groups by the rank of the trainer that sends; empty if this process is in none."""
        self._member: Member | None = None
        self._met_at = 0.0

    @property
    def stands(self) -> bool:
        """Following broadcasts may use the groups."""
        return bool(self.groups) and time.monotonic() - self._met_at < IDLE_S

    def meet(
        self,
        broadcast: str,
        member: Member,
        places: Iterable[tuple[int, Member]],
        store: Callable[[], dist.TCPStore],
        *,
        host: str,
        device: torch.device | None = None,
    ) -> None:
        """Blocks until all members of each group begin `broadcast`. If `member` is not in its groups yet, others are
        left and they are formed, by their wire, one after the other.

        Args:
            places: the place in the group of each sending rank, asked for when the group before is complete.
            store: finds the groups' store, if they are to be formed.
            host: this machine's address there.
            device: whose memory NCCL moves.

        Raises `RuntimeError`, `OSError`; this process is in no group then.
        """
        if member != self._member:
            self.leave()
        if (forms := not self.groups) and not member.forms_for(broadcast):
            raise RuntimeError(f"this member has left the groups of broadcast {member.group}")
        created, stream = store() if forms else None, None
        try:
            for sender, place in places:
                if stream is None and forms and member.wire != GLOO:
                    stream = NcclStream(device or torch.device("cuda" if torch.cuda.is_available() else "cpu", 0))
                try:
                    if created is not None:
                        self.groups[sender] = (
                            NcclGroup(created, place, stream, self._stops)
                            if stream
                            else GlooGroup(created, place, host, self._stops)
                        )
                    else:
                        self.groups[sender].meet(broadcast)
                except RuntimeError as error:
                    rank = place.group.rpartition("/")[2]
                    raise RuntimeError(
                        f"the group in which rank {rank} of the trainer sends is not complete: a member of it is gone, "
                        f"or does not reach the others at rollout.weights_host: {error}"
                    ) from error
        except BaseException:
            self.leave()
            raise
        self._member, self._met_at = member, time.monotonic()

    def leave(self) -> None:
        """Others that wait for this member get an error, after `silence_s` at the latest."""
        groups, self.groups, self._member = self.groups, {}, None
        leave_groups(groups.values())


def leave_groups(groups: Iterable[BroadcastGroup]) -> None:
    """Close all at once: what NCCL frees for one waits for the device, on which another may wait for its member."""
    closing = [threading.Thread(target=group.close, name="leave a broadcast") for group in groups]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()


class GlooGroup(BroadcastGroup):
    """Over TCP, between the memories of hosts."""

    def __init__(self, store: dist.TCPStore, member: Member, host: str, stops: threading.Event | None = None) -> None:
        super().__init__(store, member, stops)
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

    def __init__(
        self, store: dist.TCPStore, member: Member, stream: NcclStream, stops: threading.Event | None = None
    ) -> None:
        super().__init__(store, member, stops)
        torch.cuda.set_device(stream.device)  # of this thread
        self._stream = stream
        nccl = _library()
        if member.rank == 0:
            self._store.set("nccl", nccl.unique_id().hex())
        unique_id = bytes.fromhex(self._store.get("nccl").decode())
        forming_s = max(FORMING_S, member.silence_s)
        self._communicator = nccl.join(member.size, unique_id, member.rank, forming_s, stops)

    def begin(self, bucket: torch.Tensor) -> Transfer:
        """See `BroadcastGroup.begin`. Returns when it is posted on the stream: what begins later, in any group of the
        stream, comes after it there. NCCL posts it from a separate thread."""
        with torch.cuda.stream(self._stream.copies):
            # Memory of another stream may be in use by what is queued there, and again as soon as `buffer` is gone.
            buffer = torch.empty(len(bucket), dtype=torch.uint8, device=self._stream.device)
            if self._member.rank == 0:
                buffer.copy_(bucket, non_blocking=True)
        self._stream.stream.wait_stream(self._stream.copies)
        self._communicator.broadcast(buffer.data_ptr(), len(bucket), self._stream.stream.cuda_stream)
        self._wait_while(lambda: self._communicator.busy)
        received = torch.cuda.Event()
        received.record(self._stream.stream)
        return _NcclTransfer(self, bucket, buffer, received)

    def finish(self, transfer: _NcclTransfer) -> None:
        """See `Transfer.wait`."""
        self._wait_while(lambda: self._communicator.busy or not transfer.received.query())
        if self._member.rank:
            with torch.cuda.stream(self._stream.copies):
                transfer.bucket.copy_(transfer.buffer)

    def close(self) -> None:
        self._communicator.abort()

    def _wait_while(self, busy: Callable[[], bool]) -> None:
        until_idle(busy, self._member.silence_s, self._stops)


class NcclStream:
    """The CUDA stream of all groups of one member: communicators of one device that run side by side may wait for each
    other without end, so their broadcasts are posted on it in one order, which is that of all members.

    Copies from and to the host have a stream of their own. They block this process, without a deadline, until what is
    on their stream is done, and that must not be a broadcast whose sender is gone.

    A later broadcast takes both over, and with them the memory that torch keeps for each stream.
    """

    _idle: ClassVar[dict[torch.device, list[tuple[torch.cuda.Stream, torch.cuda.Stream]]]] = {}

    def __init__(self, device: torch.device) -> None:
        idle = self._idle.setdefault(device, [])
        pair = idle.pop() if idle else (torch.cuda.Stream(device), torch.cuda.Stream(device))
        self.device, (self.stream, self.copies) = device, pair
        weakref.finalize(self, _keep_idle, idle, pair)


def _keep_idle(
    idle: list[tuple[torch.cuda.Stream, torch.cuda.Stream]], pair: tuple[torch.cuda.Stream, torch.cuda.Stream]
) -> None:
    """Keep streams whose broadcast is over, unless something that cannot be ended is still on one."""
    if all(stream.query() for stream in pair):
        idle.append(pair)


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
