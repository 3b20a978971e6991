"""The trainer's side of the ``collective`` transport: a version's file, broadcast to the servers that are ready.

    offer(v) ─ window ─┬─ group of those that asked ─ buckets … ─┬─ over
    server a  join ────┤ seat, receive ……………………………………………… done │
    server b  join ────┤ seat, receive ……… killed: the round ends; its members have the rest over HTTP
    server c           └─ join: "too late": all of it over HTTP

Nobody waits for a round: the trainer's step goes on, the window is short, and who is not there in time, or loses its
peers in the middle, takes the same file by another way. At most one round is on.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from penstock.weight_sync.round_group import (
    BUCKET_BYTES,
    SILENCE_S,
    RoundGroup,
    Seat,
    open_store,
    send_file,
)

WINDOW_S = 0.5
"""Servers look for announcements every 0.15 s: those that are ready are there by then."""
logger = logging.getLogger(__name__)


class RoundClosed(Exception):
    """There is no seat; the message says why. The file is to be had all the same."""


@dataclass
class _Round:
    name: str
    file: BinaryIO
    expected: int | None
    members: list[tuple[asyncio.Future[Seat], Callable[[], bool]]] = field(default_factory=list)
    full: asyncio.Event = field(default_factory=asyncio.Event)
    closed: bool = False


class Rounds:
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
        self._round: _Round | None = None
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
        self._round = _Round(name, path.open("rb", buffering=0), expected)
        self._task = asyncio.create_task(self._run(self._round), name=f"round {name}")
        return name

    async def join(self, name: str, alive: Callable[[], bool]) -> Seat:
        """A seat, once the window has closed; none for a server that is not `alive` then. Raises `RoundClosed`."""
        current = self._round
        if current is None or current.name != name or current.closed:
            raise RoundClosed(f"round {name} is over, or began without this server")
        seat: asyncio.Future[Seat] = asyncio.get_running_loop().create_future()
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

    async def _run(self, current: _Round) -> None:
        with current.file:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(current.full.wait(), self._window_s)
            current.closed = True
            members = [seat for seat, alive in current.members if alive() and not seat.cancelled()]
            if members:
                await self._hold(current, members)

    async def _hold(self, current: _Round, members: list[asyncio.Future[Seat]]) -> None:
        began = time.monotonic()
        try:
            listener = _listen(self._host, len(members))
        except OSError as error:
            for member in members:
                member.set_exception(RoundClosed(f"the trainer cannot listen on {self._host}: {error.strerror}"))
            return
        seats = self._seats(current.name, listener.getsockname()[1], len(members) + 1)
        for member, seat in zip(members, seats[1:], strict=True):
            member.set_result(seat)
        done = await asyncio.to_thread(self._broadcast, current.file, listener, seats[0])
        self.last = (len(members), done)
        logger.info("round %s: %d of %d servers, %.2f s", current.name, done, len(members), time.monotonic() - began)

    def _seats(self, name: str, port: int, size: int) -> list[Seat]:
        return [Seat(port, name, rank, size, self._bucket_bytes, self._silence_s) for rank in range(size)]

    def _broadcast(self, file: BinaryIO, listener: socket.socket, seat: Seat) -> int:
        """Servers that have all bytes. What goes wrong costs this round: its members go on over HTTP."""
        try:
            store = open_store(listener, seat)
            with contextlib.closing(RoundGroup(store, seat, _reachable(self._host))) as group:
                send_file(group, file, seat.bucket_bytes, self._closed)
                return group.count_done()
        except (RuntimeError, OSError) as error:
            logger.warning("round %s ended early, its servers take the file: %s", seat.name, error)
            return 0
        finally:
            listener.close()


def _listen(host: str, count: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.bind((host, 0))
    listener.listen(count + 1)
    return listener


def _reachable(host: str) -> str:
    """An address that means "all interfaces" is none that peers could connect to."""
    return socket.gethostname() if host in ("0.0.0.0", "::") else host  # noqa: S104 (not a binding)
