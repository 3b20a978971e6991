"""The trainer's event loop: servers that wait for the next broadcast, and their places in its groups.

    server a  ── POST /broadcasts ───────────────┐ place ─ receives ─ POST /broadcasts … (waits for v8)
    server b  ── POST /broadcasts ───────┐ place │ receives
    server c                             │       │                   ── POST /broadcasts … (v8; takes v7's file)
    trainer                     open(v7)─┴───────┴─ buckets ─ announce v7

The members of v are the servers that wait when v begins: joining and leaving cost the others nothing, and no server
is waited for. While these are the same, with the places that they had (`Offer.seat`), the groups of the version before
stand; otherwise new ones are formed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.weight_sync.broadcast.offer import (
    BUCKET_BYTES,
    FORMING_S,
    GLOO,
    NCCL,
    SILENCE_S,
    Member,
    Offer,
    StreamTensor,
    seat_name,
    sending_ranks,
)

if TYPE_CHECKING:
    from penstock.weight_sync.broadcast.group import Membership

logger = logging.getLogger(__name__)
PARK_S = 20.0
"""A server that waited so long asks again: connections without traffic are cut on some networks."""
SEND_S = 20.0
SEND_BYTES_PER_S = 50e6
"""A broadcast takes `SEND_S` and what its bytes take at this rate, at most; then all members take the file."""
MOST_WORKERS = 1024


class OtherWire(Exception):
    """The server cannot be in a group with this trainer; the message says why and what helps."""


@dataclass(frozen=True, slots=True)
class Sending:
    """The trainer's side of one broadcast."""

    name: str
    host: str
    servers: int
    """Number of servers with places."""
    member: Member
    """Rank 0's in its own group."""
    deadline_s: float
    membership: Membership
    """Rank 0's groups."""
    listener: socket.socket | None = None
    """For the store of groups that are to be formed."""
    senders: tuple[int, ...] = (0,)
    """The trainer's ranks that send."""
    closed: threading.Event = field(default_factory=threading.Event)


@dataclass(eq=False, slots=True)
class _ParkedServer:
    count: int
    wire: str
    seat: str
    """`Offer.seat` of the groups in which its workers are."""
    alive: Callable[[], bool]
    offer: asyncio.Future[Offer | None]


@dataclass(frozen=True, slots=True)
class _Seating:
    """Rank 0's place, and those of the servers, in groups that broadcasts use one after the other."""

    member: Member
    senders: tuple[int, ...]
    first_ranks: Mapping[str, int]
    """First rank by seat."""

    def fits(self, waiting: Sequence[_ParkedServer], wire: str, senders: tuple[int, ...]) -> bool:
        """The same servers wait, each with its workers in the groups."""
        seats = sorted(parked.seat for parked in waiting)
        return seats == sorted(self.first_ranks) and (wire, senders) == (self.member.wire, self.senders)


class Broadcaster:
    """Rank 0 has one. Its event loop calls it."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        wires: Sequence[str] = (GLOO,),
        bucket_bytes: int = BUCKET_BYTES,
        silence_s: float = SILENCE_S,
    ) -> None:
        """`wires`: those that this trainer can send over."""
        from penstock.weight_sync.broadcast.group import Membership  # imports torch, which servers do without

        self.bucket_bytes = bucket_bytes
        self._wires = frozenset(wires)
        self._host, self._silence_s = host, silence_s
        self._life = f"{time.time_ns():x}"
        """A trainer that came back must not take what servers hold of an earlier life for its own."""
        self._numbers = itertools.count(1)
        self._parked: list[_ParkedServer] = []
        self._closed = threading.Event()
        self.membership = Membership(self._closed)
        """Rank 0's groups; left by who closes this."""
        self._seating: _Seating | None = None
        self._warned: set[str] = set()

    @property
    def parked(self) -> int:
        """Servers that wait."""
        return len(self._waiting())

    async def park(
        self,
        count: int,
        wires: str,
        alive: Callable[[], bool] = lambda: True,
        wait_s: float = PARK_S,
        *,
        seat: str = "",
    ) -> Offer | None:
        """The places of a server with `count` workers in the next broadcast; None where none begins in `wait_s`.

        `wires`: what the server can receive over, its first choice first, with commas. `seat`: `Offer.seat` of the
        broadcast before, if its workers received all of it. Raises `OtherWire`, `ValueError`
        for a count that is none.
        """
        wire = next((one for one in wires.split(",") if one in self._wires), None)
        if wire is None:
            raise OtherWire(
                f"rollout.weight_transport: this trainer broadcasts over {', '.join(sorted(self._wires))}, the server "
                f"over {wires!r:.80}: members of one group must be of one build. Install the same release for both, or "
                "set it to http"
            )
        self._warn_of_gloo(wires, wire)
        if not 1 <= count <= MOST_WORKERS:
            raise ValueError(f"count is {count}, not 1 to {MOST_WORKERS}")
        parked = _ParkedServer(count, wire, seat, alive, asyncio.get_running_loop().create_future())
        self._parked.append(parked)
        try:
            async with asyncio.timeout(wait_s):
                return await parked.offer
        except TimeoutError:
            # A place that was given in the same moment is a member that the others wait for.
            has_place = parked.offer.done() and not parked.offer.cancelled()
            return parked.offer.result() if has_place else None
        finally:
            if parked in self._parked:
                self._parked.remove(parked)

    def _warn_of_gloo(self, offered: str, wire: str) -> None:
        """Logs once for each server's build that two versions of NCCL make a broadcast go through host memory."""
        theirs = next((one for one in offered.split(",") if one.startswith(NCCL)), None)
        ours = next((one for one in self._wires if one.startswith(NCCL)), None)
        if wire == GLOO and ours and theirs and theirs not in self._warned:
            self._warned.add(theirs)
            logger.warning(
                "rollout.weight_transport: weights go over gloo, which is slower: the trainer has %s, a server has %s. "
                "Install the same torch for both (TORCH_VERSION=… scripts/install-torch)",
                *(one.replace(NCCL, "NCCL ") for one in (ours, theirs)),
            )

    def open(
        self,
        version: int,
        tensors: Sequence[StreamTensor],
        sizes: Sequence[tuple[int, ...]] | None = None,
        orders: Sequence[tuple[int, ...]] | None = None,
    ) -> Sending:
        """Give all that wait their places. Without any of them where the trainer cannot listen.

        `sizes`: of each tensor, the bytes on each of the trainer's ranks; by default it has one rank. `orders`: of each
        tensor, the ranks in the order of their bytes, empty where it is ascending, as by default.

        A group has one wire: that of most servers. The others take the version's file.
        """
        candidates, self._parked = self._waiting(), []
        wires = Counter(parked.wire for parked in candidates)
        wire = max(wires, key=wires.__getitem__, default=GLOO)
        waiting = [parked for parked in candidates if parked.wire == wire]
        for parked in candidates:
            if parked.wire != wire:
                parked.offer.set_result(None)
        name = f"{self._life}-{next(self._numbers)}"
        deadline_s = SEND_S + sum(tensor.nbytes for tensor in tensors) / SEND_BYTES_PER_S
        sizes = [(tensor.nbytes,) for tensor in tensors] if sizes is None else sizes
        lie = list(zip(sizes, orders or [()] * len(sizes), strict=True))
        ways = {way: number for number, way in enumerate(dict.fromkeys(lie))}
        split_of, splits = tuple(ways[way] for way in lie), tuple(split for split, _ in ways)
        senders = tuple(sending_ranks(splits))
        listener = None
        if not (self.membership.stands and self._seating and self._seating.fits(waiting, wire, senders)):
            listener = self._seat(name, waiting, wire, senders)
        if listener is not None and wire != GLOO:
            deadline_s += FORMING_S
        seating = self._seating
        for parked in waiting:
            offer = None
            if seating is not None:
                member = seating.member
                offer = Offer(
                    version, member.port, name, member.group, seating.first_ranks[parked.seat], parked.count,
                    member.size, member.bucket_bytes, member.silence_s, deadline_s,
                    tuple(tensors), splits, split_of, tuple(order for _, order in ways), wire=wire,
                )  # fmt: skip
            parked.offer.set_result(offer)
        place = seating.member if seating else Member(0, name, 0, 1, self.bucket_bytes, self._silence_s, wire)
        servers = len(waiting) if seating else 0
        return Sending(name, self._host, servers, place, deadline_s, self.membership, listener, senders, self._closed)

    def _seat(
        self, name: str, waiting: Sequence[_ParkedServer], wire: str, senders: tuple[int, ...]
    ) -> socket.socket | None:
        """Give them places in new groups, which are named after the broadcast `name`. Returns the listener of their
        store; None, and no places, if no server waits or the trainer cannot listen."""
        size = 1 + sum(parked.count for parked in waiting)
        self._seating, listener = None, self._listen(size) if waiting else None
        if listener is None:
            return None
        member = Member(listener.getsockname()[1], name, 0, size, self.bucket_bytes, self._silence_s, wire)
        first_ranks = dict[str, int]()
        rank = 1
        for parked in waiting:
            parked.seat = seat_name(name, rank)
            first_ranks[parked.seat] = rank
            rank += parked.count
        self._seating = _Seating(member, senders, first_ranks)
        return listener

    def close(self) -> None:
        """Rejects waiting servers and stops after the current bucket."""
        self._closed.set()
        for parked in self._parked:
            if not parked.offer.done():
                parked.offer.set_result(None)

    def _waiting(self) -> list[_ParkedServer]:
        return [parked for parked in self._parked if parked.alive() and not parked.offer.done()]

    def _listen(self, size: int) -> socket.socket | None:
        try:
            return listen(self._host, size)
        except OSError as error:
            logger.error(
                "rollout.weights_host: the trainer cannot listen on %s, servers take files: %s",
                self._host, error.strerror,
            )  # fmt: skip
            return None


def listen(host: str, backlog: int) -> socket.socket:
    """A free port of `host`. Raises `OSError`."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.bind((host, 0))
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener
