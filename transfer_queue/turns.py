"""Turns on devices that engines and trainer share: the holder, the memory that each holds, the waiting side.

    engines  hold ─► load, sample ─► the trainer waits ─► sleep ─► rest ──┐
       ▲                                                                 ▼
       └── rest ◄─ offload ◄─ publish ◄─ train ◄─ load ◄─ hold ◄────── trainer

Several engines hold the devices at once, a trainer holds them alone. While a trainer waits no further engine begins.
An entry that is not renewed for its time to live is over: that is how a killed side gives its turn back. Bytes
are claimed before they are allocated, and the sum of all claims never exceeds the budget.

`TurnTable` is the rule, which the queue in memory has as it is and Redis as a script; `DeviceTurn` is the part of one
process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from penstock.common import cancel_and_wait
from penstock.transfer_queue.errors import QueueError, QueueUnavailable

logger = logging.getLogger(__name__)
Side = Literal["engine", "trainer"]
KEPT_TURN_REPORTS = 4000
ALL_THAT_IS_FREE = -1
"""Claimed while a model is loaded, before it is known what it needs."""
ASK_S = 0.2
"""Between two calls of those that wait, and of engines that hold: a trainer may be waiting."""
REST_S = 1.0
"""Between those of the others."""


@dataclass(frozen=True, slots=True)
class TurnCall:
    """Request or report of one process."""

    side: Side
    holder: str
    """One process, by a name that no other life of it has."""
    number: int
    """Number of the holder's call, ascending: a repeat, or one that was overtaken, changes nothing."""
    holds: bool
    """True if it wants or holds the devices; False if it rests."""
    ttl_s: float
    bytes: int = 0
    """Claimed of the devices' memory from now on; `ALL_THAT_IS_FREE`."""
    used: int = 0
    """Measured."""
    budget: int = 0
    """Bytes that all claims together may have; 0: they are not limited."""


@dataclass(frozen=True, slots=True)
class TurnHolder:
    """One process's entry."""

    side: Side
    holder: str
    holds: bool
    waits: bool
    bytes: int
    used: int
    fence: int = 0
    """Fence of its turn, above those of all earlier turns; 0 if it holds none."""


@dataclass(frozen=True, slots=True)
class Turns:
    """All entries, as the queue has them after a call."""

    fence: int
    """The caller's; 0: it does not hold the devices."""
    is_requested: bool
    """The other side waits."""
    over_budget: bool
    """The caller's claim was refused: its bytes, besides those of the others, exceed the budget."""
    holders: tuple[TurnHolder, ...]
    """Sorted by name."""


@dataclass(frozen=True, slots=True)
class TurnReport:
    """One change of an entry, and the sums of all entries after it."""

    at_s: float
    """Time on the queue's clock."""
    side: Side
    holder: str
    holds: bool
    bytes: int
    used: int
    total_bytes: int
    total_used: int


@dataclass(slots=True)
class _Entry:
    state: TurnHolder
    number: int
    until: float


class TurnTable:
    """All entries in memory. `clock` in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._fence = 0
        self.reports: deque[TurnReport] = deque(maxlen=KEPT_TURN_REPORTS)

    def take(self, call: TurnCall) -> Turns:
        """See `TransferQueue.take_turn`."""
        self._expire()
        mine, over = self._entries.get(call.holder), False
        if mine is None or call.number > mine.number:
            before = mine.state if mine else TurnHolder(call.side, call.holder, False, False, 0, 0)
            after, over = self._decide(call, before)
            self._entries[call.holder] = _Entry(after, call.number, self._clock() + call.ttl_s)
            if replace(before, waits=after.waits) != after:
                self._report(after)
        return self._answer(call.holder, over)

    def look(self) -> Turns:
        """Returns all entries without a caller's own part."""
        self._expire()
        return self._answer("", over=False)

    def _expire(self) -> None:
        now = self._clock()
        self._entries = {name: one for name, one in self._entries.items() if one.until > now}

    def _decide(self, call: TurnCall, before: TurnHolder) -> tuple[TurnHolder, bool]:
        if not call.holds:
            return TurnHolder(call.side, call.holder, False, False, max(0, call.bytes), call.used), False
        others = [one.state for name, one in self._entries.items() if name != call.holder]
        taken = sum(one.bytes for one in others)
        claim = max(0, call.budget - taken) if call.bytes < 0 else call.bytes
        over = bool(call.budget) and taken + claim > call.budget
        if before.holds:
            return replace(before, bytes=before.bytes if over else claim, used=call.used), over
        alone = any(one.holds and "trainer" in (call.side, one.side) for one in others)
        behind = call.side == "engine" and any(one.waits and one.side == "trainer" for one in others)
        if alone or behind or over:
            return replace(before, waits=True, used=call.used), over and not alone
        self._fence += 1
        return TurnHolder(call.side, call.holder, True, False, claim, call.used, self._fence), False

    def _report(self, after: TurnHolder) -> None:
        sums = (sum(getattr(one.state, name) for one in self._entries.values()) for name in ("bytes", "used"))
        self.reports.append(
            TurnReport(self._clock(), after.side, after.holder, after.holds, after.bytes, after.used, *sums)
        )

    def _answer(self, caller: str, over: bool) -> Turns:
        holders = tuple(self._entries[name].state for name in sorted(self._entries))
        mine = self._entries[caller].state if caller in self._entries else None
        side = mine.side if mine else ""
        is_requested = any(one.waits and one.side != side for one in holders)
        return Turns(mine.fence if mine else 0, is_requested, over, holders)


class TurnQueue(Protocol):
    """The part of the queue that a turn needs."""

    async def take_turn(self, call: TurnCall) -> Turns: ...


class TurnLost(RuntimeError):
    """This process was silent for so long that the other side has taken the devices: it must release their memory."""


class TurnTimeout(RuntimeError):
    """The other side did not hand the devices over in time; the message names it."""


class OverBudget(RuntimeError):
    """This side's need and the bytes that the others keep exceed the budget; the message has the sums and the fix."""


@dataclass(frozen=True, slots=True)
class TurnSettings:
    """`placement` as the two sides are given it."""

    budget: int = 0
    """Bytes of the shared devices together; 0: not limited."""
    ttl_s: float = 15.0
    """A side that is silent for this long has given its turn back."""
    hand_over_s: float = 900.0
    """Longest wait for the other side to hand over."""
    sleep_level: Literal[1, 2] = 1
    """Level of the engines' sleep in the trainer's turn: 1 keeps their weights in host memory, 2 drops them."""


class DeviceTurn:
    """One process's part. `kept` renews the entry in the background; `take` and `give_back` in turn, from one task."""

    def __init__(self, queue: TurnQueue, side: Side, holder: str, settings: TurnSettings) -> None:
        self.settings = settings
        self.is_requested = False
        """The other side waits for the devices, as last heard while this one holds them."""
        self.fence = 0
        """Fence of the turn that is held; 0: none."""
        self.used: Callable[[], int] = lambda: 0
        """Measures what this process has on the devices; called in the event loop."""
        self._queue, self._side, self._holder = queue, side, holder
        self._number = 0
        self._bytes = 0
        self._asks = False
        """`take` is under way: what it says counts, and renews."""
        self._loss_reason = ""
        self._over_since: float | None = None
        self._others: list[TurnHolder] = []
        self._one_call = asyncio.Lock()

    @property
    def holds(self) -> bool:
        return self.fence > 0

    @asynccontextmanager
    async def renewal(self) -> AsyncGenerator[DeviceTurn]:
        """Renewed until the end of the block; an entry that rests is taken away then."""
        keeping = asyncio.create_task(self._keep(), name="device turn")
        try:
            yield self
        finally:
            await cancel_and_wait([keeping])
            # Who still holds them has its memory on them until its process has ended: the entry is over by itself.
            if not self.holds:
                await self.give_back()

    def check(self) -> None:
        """Raises `TurnLost` if the turn is over."""
        if self._loss_reason:
            raise TurnLost(self._loss_reason)

    async def take(self, needs: int, while_waiting: Callable[[], Awaitable[None]] | None = None) -> None:
        """Waits until this process holds the devices with a claim of `needs` bytes.

        `while_waiting` is awaited between two attempts, and may raise. An engine waits as long as the trainer renews
        its turn. Raises `TurnTimeout`, `OverBudget`.
        """
        deadline = time.monotonic() + self.settings.hand_over_s
        self._asks, self._over_since = True, None
        try:
            while not await self._try(needs):
                if while_waiting is not None:
                    await while_waiting()
                if self._side == "trainer" and time.monotonic() > deadline:
                    raise TurnTimeout(self._late())
                await asyncio.sleep(ASK_S)
        finally:
            self._asks = False

    async def claim(self, needs: int) -> None:
        """Changes the claim of a turn that is held, before memory grows: returns when the queue has it.

        What a killed process had counts until its entry is over. Raises `OverBudget`, `TurnLost`, `TurnTimeout`.
        """
        deadline = time.monotonic() + self.settings.hand_over_s
        self._over_since = None
        while not await self._try(needs) or self._over_since is not None:
            if not self.holds:
                self._loss_reason = self._loss_reason or f"{self._holder} does not hold the devices any more"
                self.check()
            if time.monotonic() > deadline:
                raise TurnTimeout(self._late())
            await asyncio.sleep(ASK_S)

    async def give_back(self, retained: int = 0) -> None:
        """The other side may take the devices; `retained` bytes of them stay with this process.

        Where the queue is away `retained` says it again, or the entry is over after its time.
        """
        async with self._one_call:
            self.fence, self.is_requested, self._bytes, self._loss_reason = 0, False, retained, ""
            try:
                await self._call(holds=False, size=retained)
            except QueueUnavailable as error:
                logger.warning("the turn on the devices is not given back yet: %s", error)

    async def _try(self, needs: int) -> bool:
        async with self._one_call:
            try:
                turns = await self._call(holds=True, size=needs)
            except QueueUnavailable as error:
                logger.warning("the queue does not say whose turn it is: %s", error)
                return False
            self.fence, self.is_requested = turns.fence, turns.is_requested
            self._others = [one for one in turns.holders if one.holder != self._holder]
            self._check_budget(turns, needs)
            if self.holds:
                mine = next(one for one in turns.holders if one.holder == self._holder)
                self._bytes = mine.bytes
        return self.holds

    def _check_budget(self, turns: Turns, needs: int) -> None:
        """Raises `OverBudget` if the budget is exceeded although no holder may still leave bytes and no entry of a
        killed process may still end."""
        waits, others_hold = turns.fence == 0, any(one.holds for one in self._others)
        if not turns.over_budget or (waits and others_hold):
            self._over_since = None
            return
        self._over_since = self._over_since or time.monotonic()
        if (waits or others_hold) and time.monotonic() - self._over_since <= self.settings.ttl_s + REST_S:
            return
        others_bytes = sum(one.bytes for one in self._others)
        raise OverBudget(
            f"{self._holder} needs {needs} bytes of the devices, and the others keep {others_bytes}: together more "
            f"than placement.memory_budget_bytes, {self.settings.budget}. Raise it, or take less: a smaller model or "
            + ("rollout.kv_cache_tokens" if self._side == "engine" else "trainer.micro_batch_tokens, trainer.lora.rank")
        )

    def _late(self) -> str:
        names = ", ".join(f"{one.holder} ({one.side})" for one in self._others if one.holds) or "none"
        return (
            f"the devices were not handed over within {self.settings.hand_over_s:g} s: "
            f"on them: {names}. Its log says what it does; a larger model needs a longer time"
        )

    async def _call(self, *, holds: bool, size: int) -> Turns:
        self._number += 1
        ttl_s, budget = self.settings.ttl_s, self.settings.budget
        call = TurnCall(self._side, self._holder, self._number, holds, ttl_s, size, self.used(), budget)
        return await self._queue.take_turn(call)

    async def _keep(self) -> None:
        """Renews what was last said. A queue that is away gives the devices to no other side."""
        while True:
            asks = self.holds and self._side == "engine"
            await asyncio.sleep(ASK_S if asks else min(REST_S, self.settings.ttl_s / 4))
            if self._asks:
                continue
            try:
                async with self._one_call:
                    await self._renew()
            except QueueError as error:
                logger.warning("the turn on the devices is not renewed: %s", error)
            except Exception as error:
                self._loss_reason, self.fence = f"the turn is not renewed any more: {error!r}", 0
                raise

    async def _renew(self) -> None:
        if not self.holds:
            await self._call(holds=False, size=self._bytes)
            return
        turns = await self._call(holds=True, size=self._bytes)
        if not turns.fence:
            self._loss_reason = (
                f"{self._holder} was silent for more than {self.settings.ttl_s:g} s, and the devices were given to "
                + ", ".join(one.holder for one in turns.holders if one.holds and one.holder != self._holder)
            )
            logger.error(self._loss_reason)
        self.fence, self.is_requested = turns.fence, turns.is_requested
