"""What `TransferQueue` promises of devices that engines and trainer share: turns, their ends, and the byte budget."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from queue_samples import LIMITS

from penstock.testing import MemoryTransferQueue
from penstock.transfer_queue import (
    ALL_THAT_IS_FREE,
    DeviceTurn,
    OverBudget,
    QueueError,
    QueueUnavailable,
    TransferQueue,
    TurnCall,
    TurnLost,
    Turns,
    TurnSettings,
    TurnTimeout,
)
from penstock.transfer_queue.turns import Side

LONG_S, SHORT_S = 60.0, 0.3
BUDGET = 1000


class Party:
    """One process that calls by itself, without a `DeviceTurn`."""

    def __init__(self, queue: TransferQueue, side: Side, name: str, budget: int = 0) -> None:
        self.queue, self.last = queue, TurnCall(side, name, 0, holds=False, ttl_s=LONG_S, budget=budget)

    async def __call__(self, *, holds: bool, **said: Any) -> Turns:
        self.last = replace(self.last, number=self.last.number + 1, holds=holds, **said)
        return await self.queue.take_turn(self.last)

    async def again(self, **changed: Any) -> Turns:
        return await self.queue.take_turn(replace(self.last, **changed))


async def test_engines_share_and_a_trainer_is_alone(make_queue) -> None:
    queue = await make_queue(LIMITS)
    one, other, trainer = (Party(queue, *who) for who in (("engine", "a"), ("engine", "b"), ("trainer", "t")))
    fences = [(await one(holds=True)).fence, (await other(holds=True)).fence]
    assert 0 < fences[0] < fences[1]
    assert (await trainer(holds=True)).fence == 0
    seen = await queue.turns()
    assert (seen.fence, seen.is_requested, seen.over_budget, len(seen.holders)) == (0, True, False, 3)
    assert (await one(holds=True)).is_requested
    await one(holds=False)
    assert (await trainer(holds=True)).fence == 0
    await other(holds=False)
    held = await trainer(holds=True)
    assert held.fence > fences[1]
    assert not held.is_requested
    assert (await one(holds=True)).fence == 0
    assert (await trainer(holds=True)).is_requested
    assert (await trainer(holds=True)).fence == held.fence
    await trainer(holds=False)
    assert (await one(holds=True)).fence > held.fence


async def test_a_call_that_names_no_budget_has_none(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.take_turn(TurnCall("engine", "a", 1, holds=True, ttl_s=LONG_S, bytes=700))
    await asyncio.sleep(0.05)
    found = await queue.take_turn(TurnCall("engine", "b", 1, holds=True, ttl_s=LONG_S, bytes=900))
    assert [(one.holds, one.bytes, one.used) for one in found.holders] == [(True, 700, 0), (True, 900, 0)]
    first, second = await queue.turn_reports()
    assert (second.total_bytes, second.total_used) == (1600, 0)
    assert 0.04 <= second.at_s - first.at_s <= 60


async def test_a_waiting_trainer_comes_before_further_engines(make_queue) -> None:
    queue = await make_queue(LIMITS)
    one, other, trainer = (Party(queue, *who) for who in (("engine", "a"), ("engine", "b"), ("trainer", "t")))
    await one(holds=True)
    await trainer(holds=True)
    assert (await other(holds=True)).fence == 0
    assert (await one(holds=True)).fence
    await trainer(holds=False)
    assert (await other(holds=True)).fence


@pytest.mark.parametrize(("dead", "next_one"), [("trainer", "engine"), ("engine", "trainer"), ("trainer", "trainer")])
async def test_a_killed_side_gives_its_turn_back(make_queue, dead: Side, next_one: Side) -> None:
    queue = await make_queue(LIMITS)
    killed, living = Party(queue, dead, "killed", BUDGET), Party(queue, next_one, "living", BUDGET)
    first = await killed(holds=True, bytes=BUDGET)
    assert first.fence
    assert (await living(holds=True, bytes=BUDGET)).fence == 0
    await killed(holds=True, bytes=BUDGET, ttl_s=SHORT_S)  # its last word
    async with asyncio.timeout(200):
        while not (found := await living(holds=True, bytes=BUDGET)).fence:
            await asyncio.sleep(0.05)
    assert found.fence > first.fence
    assert [one.holder for one in found.holders] == ["living"]
    # It lives after all: what it says as one that holds is refused, it waits as any other.
    woken = await killed(holds=True)
    assert woken.fence == 0
    assert [one.holder for one in woken.holders if one.holds] == ["living"]


async def test_a_repeat_or_an_overtaken_call_changes_nothing(make_queue) -> None:
    queue = await make_queue(LIMITS)
    engine = Party(queue, "engine", "a")
    late = replace(engine.last, number=1, holds=True)
    first = await engine(holds=True, bytes=5)
    assert await engine.again() == first
    assert await engine.again(bytes=7, holds=False) == first
    rested = await engine(holds=False)
    assert await queue.take_turn(late) == rested
    assert [one.holds for one in (await queue.turns()).holders] == [False]
    assert len(await queue.turn_reports()) == 2


async def test_claims_stay_within_the_budget(make_queue) -> None:
    queue = await make_queue(LIMITS)
    one, other, trainer = (Party(queue, *who, BUDGET) for who in (("engine", "a"), ("engine", "b"), ("trainer", "t")))
    assert (await one(holds=True, bytes=600)).fence
    refused = await other(holds=True, bytes=500)
    assert (refused.fence, refused.over_budget) == (0, True)
    grown = await one(holds=True, bytes=BUDGET + 1)
    assert (grown.fence > 0, grown.over_budget, grown.holders[0].bytes) == (True, True, 600)
    await one(holds=True, bytes=500)
    assert (await other(holds=True, bytes=500)).fence
    await other(holds=False, bytes=100, used=90)
    await one(holds=False, bytes=0)
    held = await trainer(holds=True, bytes=ALL_THAT_IS_FREE)
    assert {held_by.holder: held_by.bytes for held_by in held.holders} == {"a": 0, "b": 100, "t": 900}
    reports = await queue.turn_reports()
    assert all(report.total_bytes <= BUDGET for report in reports)
    assert (reports[-1].holder, reports[-1].total_bytes, reports[-1].total_used) == ("t", BUDGET, 90)


async def test_only_the_newest_turn_reports_are_kept(make_queue, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("turns", "redis.queue"):
        monkeypatch.setattr(f"penstock.transfer_queue.{module}.KEPT_TURN_REPORTS", 3)
    engine = Party(await make_queue(LIMITS), "engine", "a")
    for claim in range(1, 6):
        await engine(holds=True, bytes=claim)
    assert [one.bytes for one in await engine.queue.turn_reports()] == [3, 4, 5]


@pytest.mark.parametrize("seed", range(3))
async def test_any_interleaving_is_as_in_memory(make_queue, seed: int) -> None:
    """No two sides at once, never over the budget, and the same answers as the rule itself gives."""
    queue, rule, draw = await make_queue(LIMITS), MemoryTransferQueue(), random.Random(seed)
    await rule.create_run(LIMITS, "config: 1")
    names: list[tuple[Side, str]] = [("engine", "a"), ("engine", "b"), ("trainer", "t"), ("trainer", "u")]
    parties = [(Party(queue, *who, BUDGET), Party(rule, *who, BUDGET)) for who in names]
    for _ in range(120):
        pair = draw.choice(parties)
        said = {
            "holds": draw.random() < 0.6,
            "bytes": draw.choice([-1, 0, 100, 450, 900, 1100]),
            "used": draw.randint(0, 3),
        }
        found, wanted = [await party(**said) for party in pair]
        assert found == wanted
        holding = [one for one in found.holders if one.holds]
        assert {one.side for one in holding} in (set(), {"engine"}, {"trainer"})
        assert sum(one.side == "trainer" for one in holding) <= 1
        assert sum(one.bytes for one in found.holders if one.holds) <= BUDGET
    assert [replace(one, at_s=0) for one in await queue.turn_reports()] == [
        replace(one, at_s=0) for one in await rule.turn_reports()
    ]


# one process's part ---------------------------------------------------------------------------------------------------
async def test_a_turn_is_handed_over_and_back(make_queue, another_client) -> None:
    queue = await make_queue(LIMITS)
    engine = DeviceTurn(queue, "engine", "rollout-0", TurnSettings(BUDGET))
    trainer = DeviceTurn(await another_client(queue), "trainer", "trainer", TurnSettings(BUDGET))
    async with engine.renewal(), trainer.renewal():
        await engine.take(700)
        waiting = asyncio.create_task(trainer.take(900))
        async with asyncio.timeout(200):
            while not engine.is_requested:
                await asyncio.sleep(0.02)
            await engine.give_back(100)
            await waiting
        assert (trainer.holds, engine.holds) == (True, False)
        await trainer.claim(800)
        with pytest.raises(OverBudget, match=r"placement\.memory_budget_bytes, 1000.*trainer\.micro_batch_tokens"):
            await trainer.claim(901)
        await trainer.give_back()
        async with asyncio.timeout(200):
            await engine.take(700)
    # Its memory may be on the devices until its process has ended: no other side gets the turn before its time.
    assert [(one.holds, one.bytes) for one in (await queue.turns()).holders] == [(True, 700), (False, 0)]


async def test_a_silent_holder_finds_its_turn_lost(make_queue) -> None:
    queue = await make_queue(LIMITS)
    engine = DeviceTurn(queue, "engine", "rollout-0", TurnSettings(ttl_s=SHORT_S))
    await engine.take(0)  # nothing renews it
    trainer = DeviceTurn(queue, "trainer", "trainer", TurnSettings(ttl_s=LONG_S))
    async with asyncio.timeout(200):
        await trainer.take(0)
    async with engine.renewal(), asyncio.timeout(200):
        while engine.holds:
            await asyncio.sleep(0.02)
        with pytest.raises(TurnLost, match="given to trainer"):
            engine.check()


async def test_a_hand_over_has_a_deadline_and_a_cause(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await Party(queue, "engine", "rollout-0")(holds=True)
    trainer = DeviceTurn(queue, "trainer", "trainer", TurnSettings(hand_over_s=SHORT_S))
    with pytest.raises(TurnTimeout, match="rollout-0"):
        await trainer.take(0)


async def test_a_claim_over_the_whole_budget_is_refused(make_queue) -> None:
    queue = await make_queue(LIMITS)
    trainer = DeviceTurn(queue, "trainer", "trainer", TurnSettings(BUDGET, ttl_s=SHORT_S))
    with pytest.raises(OverBudget, match=str(BUDGET)):
        await trainer.take(BUDGET + 1)


async def test_a_claim_waits_for_the_entry_of_a_killed_process(make_queue) -> None:
    """Else the next life would use what is still counted for the one before it."""
    queue = await make_queue(LIMITS)
    killed = Party(queue, "engine", "rollout-0 (killed)", BUDGET)
    await killed(holds=True, bytes=700)
    engine = DeviceTurn(queue, "engine", "rollout-0 (next)", TurnSettings(BUDGET))
    async with engine.renewal(), asyncio.timeout(200):
        await engine.take(ALL_THAT_IS_FREE)
        assert {one.holder: one.bytes for one in (await queue.turns()).holders}["rollout-0 (next)"] == 300
        await killed(holds=True, bytes=700, ttl_s=SHORT_S)  # its last word
        await engine.claim(700)
        assert [(one.holder, one.bytes) for one in (await queue.turns()).holders] == [("rollout-0 (next)", 700)]


async def test_a_claim_beside_a_living_one_over_the_budget_is_refused(make_queue) -> None:
    queue = await make_queue(LIMITS)
    first = DeviceTurn(queue, "engine", "rollout-0", TurnSettings(BUDGET))
    second = DeviceTurn(queue, "engine", "rollout-1", TurnSettings(BUDGET, ttl_s=5.0))
    async with first.renewal(), second.renewal(), asyncio.timeout(200):
        await first.take(700)
        await second.take(ALL_THAT_IS_FREE)
        with pytest.raises(
            OverBudget, match=r"rollout-1 needs 700 bytes .* the others keep 700.*rollout\.kv_cache_tokens"
        ):
            await second.claim(700)


class Relay:
    """In front of a queue: keeps the calls, and fails with what stands in `errors` first."""

    def __init__(self, queue: MemoryTransferQueue) -> None:
        self.queue = queue
        self.calls: list[TurnCall] = []
        self.errors: list[Exception] = []

    async def take_turn(self, call: TurnCall) -> Turns:
        self.calls.append(call)
        if self.errors:
            raise self.errors.pop()
        return await self.queue.take_turn(call)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not holds():
                await asyncio.sleep(0.005)


@pytest.fixture
async def relay(monkeypatch: pytest.MonkeyPatch) -> Relay:
    for name in ("ASK_S", "REST_S"):
        monkeypatch.setattr(f"penstock.transfer_queue.turns.{name}", 0.01)
    queue = MemoryTransferQueue()
    await queue.create_run(LIMITS, "config: 1")
    return Relay(queue)


async def test_a_wait_looks_beside_it_each_time(relay: Relay) -> None:
    engine, looks = Party(relay.queue, "engine", "rollout-0"), list[int]()
    await engine(holds=True)
    trainer = DeviceTurn(relay, "trainer", "trainer", TurnSettings(hand_over_s=10.0))

    async def beside() -> None:
        looks.append(len(looks))
        if len(looks) == 3:
            await engine(holds=False)

    await trainer.take(0, beside)
    assert (looks, trainer.holds) == ([0, 1, 2], True)
    await trainer.give_back()
    await engine(holds=True)

    async def gone() -> None:
        raise LookupError("rollout-0 has ended")

    with pytest.raises(LookupError, match="rollout-0 has ended"):
        await trainer.take(0, gone)


async def test_an_engine_waits_without_a_deadline(relay: Relay) -> None:
    trainer = Party(relay.queue, "trainer", "trainer")
    await trainer(holds=True)
    engine = DeviceTurn(relay, "engine", "rollout-0", TurnSettings(hand_over_s=0.0))
    waiting = asyncio.create_task(engine.take(5))
    await relay.until(lambda: len(relay.calls) >= 4)
    await trainer(holds=False)
    async with asyncio.timeout(60):
        await waiting
    assert engine.holds


async def test_a_claim_of_a_lost_turn_is_refused(relay: Relay) -> None:
    engine = DeviceTurn(relay, "engine", "rollout-0", TurnSettings(ttl_s=0.05))
    await engine.take(5)
    await asyncio.sleep(0.1)
    assert (await Party(relay.queue, "trainer", "trainer")(holds=True)).fence
    with pytest.raises(TurnLost, match="rollout-0 does not hold the devices any more"):
        await engine.claim(7)
    with pytest.raises(TurnLost, match="rollout-0"):
        engine.check()
    await engine.give_back()
    engine.check()


async def test_a_claim_that_waits_too_long_names_who_has_it(relay: Relay) -> None:
    await Party(relay.queue, "engine", "rollout-0", BUDGET)(holds=True, bytes=700)
    await Party(relay.queue, "engine", "rollout-2", BUDGET)(holds=False)
    engine = DeviceTurn(relay, "engine", "rollout-1", TurnSettings(BUDGET, hand_over_s=0.05))
    await engine.take(300)
    with pytest.raises(TurnTimeout, match=r"within 0\.05 s: on them: rollout-0 \(engine\)\. Its log"):
        await engine.claim(301)
    await engine.claim(299)
    assert [one.bytes for one in (await relay.queue.turns()).holders] == [700, 299, 0]


async def test_a_queue_that_is_away_is_asked_again(relay: Relay, caplog: pytest.LogCaptureFixture) -> None:
    engine = DeviceTurn(relay, "engine", "rollout-0", TurnSettings(BUDGET))
    assert (engine.holds, engine.is_requested) == (False, False)
    relay.errors = [QueueUnavailable("no answer")] * 2
    await engine.take(5)
    assert [(call.number, call.holds, call.bytes, call.used) for call in relay.calls] == [
        (number, True, 5, 0) for number in (1, 2, 3)
    ]
    relay.errors = [QueueUnavailable("no answer")]
    await engine.give_back(3)
    assert not engine.holds
    assert "not given back yet: no answer" in caplog.text
    assert (await relay.queue.turns()).holders[0].holds, "as far as the queue knows"


async def test_what_was_said_last_is_renewed(relay: Relay) -> None:
    """Before the first turn, in it, after it with what stays on the devices; and nothing stays at the end."""
    engine = DeviceTurn(relay, "engine", "rollout-0", TurnSettings(BUDGET))
    engine.used = lambda: 7

    async def renewals(count: int = 3) -> set[tuple[bool, int, int]]:
        relay.calls.clear()
        await relay.until(lambda: len(relay.calls) >= count)
        return {(call.holds, call.bytes, call.used) for call in relay.calls}

    async with engine.renewal():
        assert await renewals() == {(False, 0, 7)}
        await engine.take(500)
        assert await renewals() == {(True, 500, 7)}
        relay.errors = [QueueError("not now")]
        assert await renewals() == {(True, 500, 7)}
        assert engine.holds
        await engine.give_back(100)
        assert await renewals() == {(False, 100, 7)}
        numbers = [call.number for call in relay.calls]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert [(one.holds, one.bytes) for one in (await relay.queue.turns()).holders] == [(False, 0)]


async def test_a_renewal_that_breaks_loses_the_turn(relay: Relay) -> None:
    trainer = DeviceTurn(relay, "trainer", "trainer", TurnSettings())
    async with trainer.renewal():
        await trainer.take(5)
        trainer.check()
        relay.errors = [ValueError("no such entry")]
        await relay.until(lambda: not trainer.holds)
        with pytest.raises(TurnLost, match=r"not renewed any more: ValueError\('no such entry'\)"):
            trainer.check()
