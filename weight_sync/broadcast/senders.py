"""The trainer's side of a broadcast: each rank sends its own bytes to all members, in a separate group. The groups
stand for the next broadcast, if all workers had all bytes of this one.

rank 0    Members    joins all groups: sends in its own, receives in the others
rank r    OwnGroup   joins the group in which it sends, when rank 0 sends its place
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial

import torch

from penstock.common import address_towards, reachable_host
from penstock.common.address import listening_host
from penstock.weight_sync.broadcast.group import BroadcastGroup, Membership, Transfer, find_store, open_store
from penstock.weight_sync.broadcast.offer import Member
from penstock.weight_sync.broadcast.rank_wire import RankWire
from penstock.weight_sync.broadcast.seats import Sending

logger = logging.getLogger(__name__)


class Members:
    """Rank 0's places in the groups of a broadcast, as long as all of their members are there.

    What goes wrong with a member costs this broadcast: its members take the file.
    """

    def __init__(self, sending: Sending | None = None, wire: RankWire | None = None) -> None:
        """No members, if no server has a place. `wire`: to the ranks that send."""
        self._sending = sending if sending is not None and sending.servers else None
        self._wire = wire
        self._moving: list[Transfer] = []
        self._give_up_at = 0.0
        self._complete = False
        """All workers have all bytes."""

    @property
    def _groups(self) -> dict[int, BroadcastGroup]:
        return self._sending.membership.groups if self._sending is not None else {}

    @property
    def are_there(self) -> bool:
        return bool(self._groups)

    def meet(self, device: torch.device | None) -> None:
        """Blocks until all members are there, or one is not. `device`: whose memory NCCL moves.

        Raises `Superseded` where the trainer stops.
        """
        if self._sending is not None:
            self._give_up_at = time.monotonic() + self._sending.deadline_s
            self._attempt(lambda: self._meet(device))

    def begin(self, sender: int, memory: torch.Tensor) -> None:
        """`memory` [bytes] uint8: what rank 0 sends, or where what rank `sender` sends arrives; it must not change
        before `wait`. All members begin in one order."""
        self._attempt(lambda: self._begin(sender, memory))

    def wait(self) -> bool:
        """Return True if everything that was begun has arrived. If not, `memory` may still be written to."""
        self._attempt(self._wait)
        return self.are_there

    def count_done(self) -> int:
        """Return the number of workers that have all bytes."""
        groups = self._groups
        if self._sending is None or not groups:
            return 0
        done = groups[0].count_done(self._sending.name)
        self._complete = done == self._sending.member.size - 1
        return done

    def close(self) -> None:
        if self._sending is None:
            return
        if not self._complete:
            self._leave()
            if self._wire is not None and self._others:
                self._wire.dismiss(self._others)
        if self._sending.listener is not None:
            self._sending.listener.close()

    def _meet(self, device: torch.device | None) -> None:
        assert self._sending is not None
        sending, member = self._sending, self._sending.member
        host = reachable_host(sending.host)

        def store() -> torch.distributed.TCPStore:
            assert sending.listener is not None
            return open_store(sending.listener, member)

        places = self._places(member, host)
        sending.membership.meet(sending.name, member, places, store, host=listening_host(host), device=device)

    def _places(self, member: Member, host: str) -> Iterator[tuple[int, Member]]:
        """Yield rank 0's place in each group. A rank is invited when its group is next: it waits for the others no
        longer than the silence."""
        assert self._sending is not None
        yield 0, member.in_group(0)
        for sender in self._others:
            assert self._wire is not None
            place = member.in_group(sender)
            self._wire.invite(sender, json.dumps([host, self._sending.name, asdict(place)]).encode())
            yield sender, replace(place, rank=member.size)

    @property
    def _others(self) -> list[int]:
        """The ranks other than 0 that send."""
        return [rank for rank in self._sending.senders if rank] if self._sending is not None else []

    def _begin(self, sender: int, memory: torch.Tensor) -> None:
        groups = self._groups
        if self._sending is None or not groups:
            return
        if self._sending.closed.is_set():
            raise RuntimeError("the trainer stops")
        self._check_time()
        self._moving.append(groups[sender].begin(memory))

    def _wait(self) -> None:
        moving, self._moving = self._moving, []
        for transfer in moving:
            self._check_time()  # a bucket has many messages, each of which may take as long as the silence
            transfer.wait()

    def _check_time(self) -> None:
        if self._sending is not None and time.monotonic() > self._give_up_at:
            raise RuntimeError(f"not done in {self._sending.deadline_s:.0f} s")

    def _attempt(self, step: Callable[[], None]) -> None:
        try:
            step()
        except (RuntimeError, OSError) as error:
            assert self._sending is not None
            # A log record that holds the error would hold its frames, and with them the store that members wait at.
            logger.warning("broadcast %s ended early, its servers take the file: %s", self._sending.name, str(error))
            self._leave()

    def _leave(self) -> None:
        """The others of each group, those that send too, get an error, after `silence_s` at the latest."""
        assert self._sending is not None
        self._sending.membership.leave()
        self._moving.clear()


class OwnGroup:
    """The group in which a rank other than 0 sends, as long as all of its members are there. One thread uses it."""

    def __init__(self) -> None:
        self._membership = Membership()

    def join(self, place: bytes, device: torch.device | None) -> None:
        """Blocks until all members are there; without one of them the group fails."""
        host, broadcast, fields = json.loads(place)
        member = Member(**fields)
        try:
            here = listening_host(address_towards(host, member.port))
            store = partial(find_store, host, member)
            self._membership.meet(broadcast, member, [(0, member)], store, host=here, device=device)
        except (RuntimeError, OSError) as error:
            logger.warning("this rank could not join broadcast %s: %s", broadcast, error)

    def send(self, memory: Sequence[torch.Tensor]) -> None:
        """To all members; rank 0 asks again, elsewhere, for what did not come."""
        try:
            if (group := self._membership.groups.get(0)) is not None:
                for transfer in [group.begin(each) for each in memory]:
                    transfer.wait()
        except (RuntimeError, OSError) as error:
            logger.warning("this rank sends no more of a broadcast: %s", error)
            self.leave()

    def leave(self) -> None:
        self._membership.leave()
