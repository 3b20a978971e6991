"""First come, first served, and no slot is lost at whatever moment somebody gives up."""

from __future__ import annotations

import asyncio

import pytest

from penstock.sandbox.protocol import SandboxBusy
from penstock.sandbox.server.pool import Slots


async def test_slots_go_to_those_who_wait_in_their_order() -> None:
    slots, order = Slots(1), []

    async def take(name: str) -> None:
        await slots.take(5.0)
        order.append(name)

    await take("first")
    waiting = [asyncio.create_task(take(name)) for name in ("second", "third")]
    await asyncio.sleep(0)
    assert slots.waiting == 2
    slots.give()
    assert not slots.take_now()  # nobody passes those who wait
    await waiting[0]
    slots.give()
    await waiting[1]
    assert order == ["first", "second", "third"]


async def test_slots_turn_that_comes_as_its_waiter_gives_up_goes_on() -> None:
    slots = Slots(1)
    assert slots.take_now()
    leaver = asyncio.create_task(slots.take(5.0))
    await asyncio.sleep(0)
    slots.give()
    leaver.cancel()
    await asyncio.gather(leaver, return_exceptions=True)
    assert slots.take_now()


async def test_slots_wait_has_an_end_and_leaves_no_place_behind() -> None:
    slots = Slots(1)
    assert slots.take_now()
    with pytest.raises(SandboxBusy, match=r"all 1 boxes were in use; waited 0\.0 s") as busy:
        await slots.take(0.0)
    assert (slots.waiting, busy.value.after_s) == (0, 2.0)
    slots.give()
    assert slots.free == 1
