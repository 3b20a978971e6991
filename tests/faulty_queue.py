"""The queue in memory with faults that a test plants: crashes in a gap, lost payloads, calls that hang or fail."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tests.virtual_clock import VirtualClock

from penstock.testing import MemoryTransferQueue
from penstock.transfer_queue import Announcement, Batch, QueueUnavailable, ServerInfo

if TYPE_CHECKING:
    from penstock.transfer_queue import Archive


class Crash(Exception):
    """The process that made the call died here."""


class FaultyQueue(MemoryTransferQueue):
    """`MemoryTransferQueue`, whose calls of trainers and servers fail as a test says."""

    def __init__(self, archive: Archive | None = None) -> None:
        self.clock = VirtualClock()
        super().__init__(clock=self.clock, archive=archive)
        self.down = False
        """Calls raise `QueueUnavailable`."""
        self.waits_for: dict[str, asyncio.Event] = {}
        """Call → it waits for the event before it has its effect."""
        self.asked: list[tuple[str, int | str]] = []
        """(call, step, version or server), in order, before their effect."""
        self.crash_at: tuple[str, str, int] | None = None
        """(before or after, call, step or version): `Crash` is raised there, once."""
        self.replace_at: tuple[str, int] | None = None
        """Before this call another trainer claims the run, once."""
        self.lose_at: tuple[int, int] = (-1, 0)
        """A step, and how many payloads of it are lost as soon as it is fixed, once."""
        self.lost: Sequence[str] = ()
        self.durable_until: tuple[str, int] | None = None
        """The last call whose effect is on disk."""
        self._durable: Any = None

    async def _call(self, name: str, subject: int | str, *arguments: Any) -> Any:
        self.asked.append((name, subject))
        if self.down:
            raise QueueUnavailable("the queue is down")
        if name in self.waits_for:
            await self.waits_for[name].wait()
        if self.replace_at == (name, subject):
            self.replace_at = None
            await self.beside().claim_training("the one in its place")
        self._crash("before", name, subject)
        result = await getattr(super(), name)(*arguments)
        if self.durable_until == (name, subject):
            self._durable = copy.deepcopy(self._state)
        self._crash("after", name, subject)
        return result

    def _crash(self, moment: str, name: str, subject: int | str) -> None:
        if self.crash_at == (moment, name, subject):
            self.crash_at = None
            raise Crash(f"{moment} {name} of {subject}")

    def lose_the_last_second(self) -> None:
        """Its machine is gone, and with it what came after the call `durable_until`."""
        assert self._durable is not None
        self._state, self._durable = self._durable, None
        self.clock.now += 3600.0  # leases that were held then are over

    async def lease_batch(self, step: int) -> Any:
        batch = await self._call("lease_batch", step, step)
        if step == self.lose_at[0] and isinstance(batch, Batch) and not self.lost:
            self.lost = [name for group in batch.groups for name in group][: self.lose_at[1]]
            for name in self.lost:
                member = self._member(name)
                assert member is not None
                member.payload = None
        return batch

    async def publish_version(self, announcement: Announcement) -> Any:
        return await self._call("publish_version", announcement.version, announcement)

    async def spill(self, step: int, episode_ids: Any) -> Any:
        return await self._call("spill", step, step, episode_ids)

    async def commit(self, step: int, batches: Any = None) -> Any:
        return await self._call("commit", step, step, batches)

    async def heartbeat(self, server: ServerInfo) -> None:
        await self._call("heartbeat", server.server_id, server)

    async def deregister(self, server_id: str) -> None:
        await self._call("deregister", server_id, server_id)
