"""Boxes of a server: at most `max_boxes` at any time, given out, warm, or starting; some kept warm by image.

    take ─► a warm one that responds ────────────► given out ─► give_back ─► its slot: the next waiter, else a warm one
      └───► none: a slot (free, of a warm box of another image, or after a wait with a deadline) ─► started

Tasks: `_refill_for_ever` waits for `_refill_requested` (a box was taken, a slot was freed) and starts what is missing,
one at a time, in slots with no caller waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Mapping

from penstock.common import Backoff, cancel_and_wait
from penstock.sandbox.protocol import BoxNeeds, Sandbox, SandboxBusy, SandboxError, Session


class Slots:
    """`free` counts those available; they go to those who wait in their order. A taker calls `give` afterwards."""

    def __init__(self, count: int) -> None:
        self.count = self.free = count
        self.waiting = 0
        self._turns = asyncio.Semaphore(count)

    async def take(self, timeout_s: float) -> None:
        """Raises `SandboxBusy` past `timeout_s`, with the time waited."""
        started = time.monotonic()
        self.waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                await self._turns.acquire()
        except TimeoutError as error:
            waited = f"all {self.count} boxes were in use; waited {time.monotonic() - started:.1f} s in the queue"
            raise SandboxBusy(f"{waited} (sandbox.max_boxes)", 2.0) from error
        finally:
            self.waiting -= 1
        self.free -= 1

    async def take_now(self) -> bool:
        """Takes a slot without waiting. None is free while anybody waits."""
        if self._turns.locked():
            return False
        await self._turns.acquire()
        self.free -= 1
        return True

    def give(self) -> None:
        self.free += 1
        self._turns.release()


logger = logging.getLogger(__name__)
PROBE_TIMEOUT_S = 2.0
"""A warm box that does not run a command in this time is stale."""


class BoxPool:
    def __init__(self, sandbox: Sandbox, max_boxes: int, warm: Mapping[str | None, int]) -> None:
        """`warm`: how many boxes of which image to keep ready; None is the backend's default image."""
        self.slots = Slots(max_boxes)
        self.counts: Counter[str] = Counter()
        """Boxes ``taken_warm``, ``taken_cold``, found ``stale``, and given up for another image (``given_up``)."""
        self._sandbox = sandbox
        self._targets = dict(warm)
        self._warm: dict[str | None, deque[Session]] = {image: deque() for image in self._targets}
        self._refill_requested = asyncio.Event()
        self._refilling: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._refilling = asyncio.create_task(self._refill_for_ever())
        self._refill_requested.set()

    async def stop(self) -> None:
        """Ends the warm boxes; those given out belong to their takers."""
        if self._refilling is not None:
            await cancel_and_wait([self._refilling])
        for boxes in self._warm.values():
            while boxes:
                self._end_soon(boxes.popleft())
        await asyncio.gather(*self._ending, return_exceptions=True)

    @property
    def warm(self) -> int:
        return sum(map(len, self._warm.values()))

    async def take(self, label: str, image: str | None, timeout_s: float, needs: BoxNeeds | None = None) -> Session:
        """A responsive box of `image`; it belongs to the taker until `give_back`. With `needs` it is not a warm one.

        Raises:
            SandboxBusy: no slot came free in `timeout_s`.
            SandboxError: the box did not start.
        """
        session = await self._take_warm(image) if needs is None else None
        if session is not None:
            self.counts["taken_warm"] += 1
            self._refill_requested.set()
            return session
        if not await self.slots.take_now():
            self._give_one_up()
            await self.slots.take(timeout_s)
        try:
            started = await self._sandbox.start(label, image=image, needs=needs)
        except BaseException:
            self._free_slot()
            raise
        self.counts["taken_cold"] += 1
        return started

    async def give_back(self, session: Session) -> None:
        """Ends the box, also where the caller is cancelled."""
        await asyncio.shield(self._end_soon(session))

    # ---- warm boxes

    async def _take_warm(self, image: str | None) -> Session | None:
        boxes = self._warm.get(image)
        while boxes:
            session = boxes.popleft()
            try:
                usable = await _answers(session)
            except BaseException:
                self._end_soon(session)
                raise
            if usable:
                return session
            self.counts["stale"] += 1
            logger.warning("sandbox: warm box %s does not answer any more", session.session_id)
            self._end_soon(session)
        return None

    def _give_one_up(self) -> None:
        """Makes room for a waiting request: ends the oldest box of the image with the most warm ones."""
        boxes = max(self._warm.values(), key=len, default=None)
        if boxes:
            self.counts["given_up"] += 1
            self._end_soon(boxes.popleft())

    async def _refill_for_ever(self) -> None:
        # between two failed refills
        pauses = Backoff(0.5, 30.0).pauses()
        while True:
            await self._refill_requested.wait()
            self._refill_requested.clear()
            failures = await self._refill()
            if not failures:
                pauses.reset()
                continue
            pause_s = pauses.next_s()
            for image, error in failures.items():
                name = "the default image" if image is None else image
                logger.warning("sandbox: no warm box of %s, next try in %.1f s: %r", name, pause_s, error)
            await asyncio.sleep(pause_s)
            self._refill_requested.set()

    async def _refill(self) -> dict[str | None, Exception]:
        """Starts missing warm boxes; returns the errors by image. One failing image does not block others."""
        failures: dict[str | None, Exception] = {}
        while missing := [image for image in self._missing() if image not in failures]:
            if not await self.slots.take_now():
                break
            try:
                await self._add_warm(missing[0])
            except Exception as error:  # noqa: BLE001 - any backend error; warming continues
                failures[missing[0]] = error
        return failures

    def _missing(self) -> list[str | None]:
        """Images with fewer warm boxes than they should have."""
        return [image for image, count in self._targets.items() if len(self._warm[image]) < count]

    async def _add_warm(self, image: str | None) -> None:
        try:
            session = await self._sandbox.start("warm", image=image)
        except BaseException:
            self.slots.give()
            raise
        self._warm[image].append(session)
        if self.slots.waiting:  # a request that came meanwhile waits for a slot, and this may be the only one
            self._give_one_up()

    # ---- ends

    def _end_soon(self, session: Session) -> asyncio.Task[None]:
        task = asyncio.create_task(self._end(session))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task

    async def _end(self, session: Session) -> None:
        try:
            await session.close()
        except Exception as error:  # noqa: BLE001 - the slot is free; the backend reaps what is left
            logger.warning("sandbox: box %s could not be ended: %r", session.session_id, error)
        finally:
            self._free_slot()

    def _free_slot(self) -> None:
        self.slots.give()
        self._refill_requested.set()


async def _answers(session: Session) -> bool:
    with contextlib.suppress(SandboxError):
        return (await session.run(["true"], timeout_s=PROBE_TIMEOUT_S)).limit is None
    return False
