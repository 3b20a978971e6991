"""The ``collective`` transport: one version's file, broadcast by the trainer to the servers that are ready.

    offer(v) ─ window ─┬─ group of those that asked ─ buckets … ─┬─ over
    server a  join ────┤ member, receive ………………………………………… done │
    server b  join ────┤ member, receive …… killed: the broadcast ends; its members fetch the rest over HTTP
    server c           └─ join: "too late": all of it over HTTP

Nothing waits for a broadcast: the trainer's step continues and the window is short. A server that is late, or loses its
peers in the middle, keeps what it received and fetches the rest over HTTP. At most one broadcast is under way.

Each has a gloo process group of its own, with the trainer as rank 0. It touches nothing global, so a broken one does
not affect the groups that its processes have otherwise. Bytes go from rank 0 to all, a bucket at a time, in file order.

Concurrency: `Broadcaster` belongs to the trainer's event loop and broadcasts in a thread; `receive_broadcast` blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from penstock.common import reachable_host
from penstock.weight_sync.file_format import PartialFile
from penstock.weight_sync.manifest import ChainFile

WINDOW_S = 0.5
"""Servers look for announcements every 0.15 s: those that are ready are there by then."""
logger = logging.getLogger(__name__)
BUCKET_BYTES = 64 << 20
"""What a round holds in memory, in the trainer and in each server."""
SILENCE_S = 10.0
"""A peer that takes or brings nothing for so long ends the round for those who wait for it."""
JOIN_S = 10.0
"""The window is far shorter; a trainer that stopped answering is not waited for."""


class BroadcastClosed(Exception):
    """There is no seat; the message says why. The file is to be had all the same."""


@dataclass
class _Broadcast:
    name: str
    file: BinaryIO
    expected: int | None
    members: list[tuple[asyncio.Future[Member], Callable[[], bool]]] = field(default_factory=list)
    full: asyncio.Event = field(default_factory=asyncio.Event)
    closed: bool = False


class Broadcaster:
    """Rank 0 has one. The event loop calls it; broadcasts run in a thread."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        window_s: float = WINDOW_S,
        bucket_bytes: int = BUCKET_BYTES,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._host = host
        self._window_s, self._bucket_bytes, self._silence_s = window_s, bucket_bytes, silence_s
        self._life = f"{time.time_ns():x}"
        """A trainer that came back must not take servers of a round before its end for members of its own."""
        self._numbers = itertools.count(1)
        self._round: _Broadcast | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = threading.Event()
        self.last: tuple[int, int] = (0, 0)
        """Of the newest round: servers that had a seat, and those that have all bytes."""

    def offer(self, path: Path, expected: int | None = None) -> str | None:
        """Open a round for this file; its name, under which servers ask for seats. None while another one is on.

        The window ends early once `expected` servers are there. Raises `OSError` where the file cannot be read.
        """
        if self._task is not None and not self._task.done():
            return None
        name = f"{self._life}-{next(self._numbers)}"
        # Held open: the version may be deleted while it is on its way.
        self._round = _Broadcast(name, path.open("rb", buffering=0), expected)
        self._task = asyncio.create_task(self._run(self._round), name=f"round {name}")
        return name

    async def join(self, name: str, alive: Callable[[], bool]) -> Member:
        """A seat, once the window has closed; none for a server that is not `alive` then. Raises `BroadcastClosed`."""
        current = self._round
        if current is None or current.name != name or current.closed:
            raise BroadcastClosed(f"round {name} is over, or began without this server")
        seat: asyncio.Future[Member] = asyncio.get_running_loop().create_future()
        current.members.append((seat, alive))
        if current.expected is not None and len(current.members) >= current.expected:
            current.full.set()
        return await seat

    async def settle(self) -> None:
        """Until the round that is on, if one is, has ended. Bounded by its window and deadlines."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def close(self) -> None:
        """No more seats; a broadcast that is under way ends with its bucket, by its deadline at the latest."""
        self._closed.set()
        if self._round is not None:
            self._round.full.set()
        await self.settle()

    async def _run(self, current: _Broadcast) -> None:
        with current.file:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(current.full.wait(), self._window_s)
            current.closed = True
            members = [seat for seat, alive in current.members if alive() and not seat.cancelled()]
            if members:
                await self._hold(current, members)
            else:
                logger.info("round %s: 0 of 0 servers, none asked within %.1f s", current.name, self._window_s)

    async def _hold(self, current: _Broadcast, members: list[asyncio.Future[Member]]) -> None:
        began = time.monotonic()
        try:
            listener = _listen(self._host, len(members))
        except OSError as error:
            for member in members:
                member.set_exception(BroadcastClosed(f"the trainer cannot listen on {self._host}: {error.strerror}"))
            return
        seats = self._seats(current.name, listener.getsockname()[1], len(members) + 1)
        for member, seat in zip(members, seats[1:], strict=True):
            member.set_result(seat)
        done = await asyncio.to_thread(self._broadcast, current.file, listener, seats[0])
        self.last = (len(members), done)
        logger.info("round %s: %d of %d servers, %.2f s", current.name, done, len(members), time.monotonic() - began)

    def _seats(self, name: str, port: int, size: int) -> list[Member]:
        return [Member(port, name, rank, size, self._bucket_bytes, self._silence_s) for rank in range(size)]

    def _broadcast(self, file: BinaryIO, listener: socket.socket, seat: Member) -> int:
        """Servers that have all bytes. What goes wrong costs this round: its members continue over HTTP."""
        try:
            store = open_store(listener, seat)
            with contextlib.closing(BroadcastGroup(store, seat, _reachable(self._host))) as group:
                send_file(group, file, seat.bucket_bytes, self._closed)
                return group.count_done()
        except (RuntimeError, OSError) as error:
            logger.warning("round %s ended early, its servers take the file: %s", seat.name, error)
            return 0
        finally:
            listener.close()


def _listen(host: str, count: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.bind((host, 0))
        listener.listen(count + 1)
    except BaseException:
        listener.close()
        raise
    return listener


def _reachable(host: str) -> str:
    """An address that means "all interfaces" is none that peers could connect to."""
    return reachable_host(host)


@dataclass(frozen=True, slots=True)
class Member:
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


def open_store(listener: socket.socket, seat: Member) -> dist.TCPStore:
    """The trainer's; it takes `listener` over, so that it is reached where the trainer chose to listen."""
    host, port = listener.getsockname()[:2]
    descriptor = listener.detach()
    return dist.TCPStore(host, port, None, True, seat.silence, wait_for_workers=False, master_listen_fd=descriptor)


def find_store(host: str, seat: Member) -> dist.TCPStore:
    """A server's. Raises `RuntimeError` where no peer answers."""
    return dist.TCPStore(host, seat.port, None, False, seat.silence, wait_for_workers=False)


class BroadcastGroup:
    """Forming it waits until all members are there. Raises `RuntimeError` here and in `broadcast` when one is not."""

    def __init__(self, store: dist.TCPStore, seat: Member, host: str) -> None:
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


def send_file(group: BroadcastGroup, file: BinaryIO, bucket_bytes: int, closed: threading.Event) -> None:
    """All of `file` to all members. Raises `RuntimeError` once `closed` is set."""
    buffer = torch.empty(bucket_bytes, dtype=torch.uint8)
    view = buffer.numpy().data
    while count := file.readinto(view):  # type: ignore[attr-defined]
        if closed.is_set():
            raise RuntimeError("the trainer stops")
        group.broadcast(buffer[:count])


def receive_file(group: BroadcastGroup, length: int, bucket_bytes: int) -> Iterator[memoryview]:
    """`length` bytes, in buckets; each is valid until the next is asked for."""
    buffer = torch.empty(min(bucket_bytes, length), dtype=torch.uint8)
    view = buffer.numpy().data
    for begin in range(0, length, bucket_bytes):
        count = min(bucket_bytes, length - begin)
        group.broadcast(buffer[:count])
        yield view[:count]


@dataclass(frozen=True, slots=True)
class _Joined:
    seat: Member
    trainer: str
    """Host where the trainer was reached."""
    here: str
    """This machine's address on the way there."""


def receive_broadcast(url: str, token: str, link: ChainFile, part: PartialFile, closed: threading.Event) -> int:
    """Take part in the round at `url` for `link`'s file. The number of bytes that came, 0 without a seat."""
    before = part.length
    try:
        place = _join(url, token)
        if place is not None:
            _receive(place, link, part, closed)
    except (OSError, http.client.HTTPException, RuntimeError, ValueError) as error:
        logger.warning(
            "version %d: the round ended with %d of %d bytes, the rest comes over HTTP: %s",
            link.version, part.length, link.bytes, error,
        )  # fmt: skip
    return part.length - before


def _join(url: str, token: str) -> _Joined | None:
    """None where the round continues without this server."""
    target = urlsplit(url)
    kind = http.client.HTTPSConnection if target.scheme == "https" else http.client.HTTPConnection
    connection = kind(target.hostname or "", target.port, timeout=JOIN_S)
    with contextlib.closing(connection):
        connection.connect()
        here = connection.sock.getsockname()[0]
        connection.request("POST", target.path, headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            logger.info("no seat: %d %s", answer.status, answer.read(200).decode(errors="replace"))
            return None
        return _Joined(_seat(json.loads(answer.read())), target.hostname or "", here)


def _seat(fields: object) -> Member:
    """Raises `ValueError` where the trainer's answer is no seat."""
    try:
        return Member(**fields)  # type: ignore[arg-type]
    except TypeError as error:
        raise ValueError(f"the trainer's answer is no seat: {error}") from error


def _receive(place: _Joined, link: ChainFile, part: PartialFile, closed: threading.Event) -> None:
    store = find_store(place.trainer, place.seat)
    with contextlib.closing(BroadcastGroup(store, place.seat, place.here)) as group:
        for piece in receive_file(group, link.bytes, place.seat.bucket_bytes):
            part.append(piece)
            if closed.is_set():
                raise RuntimeError("this server stops")
        group.say_done()
