"""A server that shares its devices with the trainer: hand-over, sleep, what is in flight, what may die meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.rollout_server.conftest import (
    RunningServer,
    RunQueue,
    ask,
    begun,
    fake_answer,
    rollout_server,
    small_config,
)
from tests.until import until

from penstock.rollout_server import RolloutClient
from penstock.testing import FakeEngine
from penstock.transfer_queue import DeviceTurn, OverBudget, TurnCall, TurnSettings

BUDGET = 250
CONTEXT = [5, 6, 7]
PATIENCE_S = 60


def holding(queue: RunQueue) -> list[str]:
    return [one.side for one in queue._turns.look().holders if one.holds]


def settings(level: int = 1) -> TurnSettings:
    """No side counts as dead that a busy machine kept from renewing its turn for a while."""
    return TurnSettings(BUDGET, ttl_s=PATIENCE_S, sleep_level=level, hand_over_s=PATIENCE_S)  # type: ignore[arg-type]


@asynccontextmanager
async def trainer_of(queue: RunQueue) -> AsyncIterator[DeviceTurn]:
    turn = DeviceTurn(queue, "trainer", "the trainer", settings())
    async with turn.renewal():
        yield turn


async def awake(server: RunningServer, queue: RunQueue) -> None:
    await server.until(lambda: queue.registered["s0"].accepting)


async def test_it_starts_and_serves_in_turns(queue: RunQueue, tmp_path: Path) -> None:
    async with trainer_of(queue) as trainer, rollout_server(queue, tmp_path, turn=settings(), up=False) as server:
        await trainer.take(200)  # before the server asked, or after its first turn
        await until(lambda: holding(queue) == ["trainer"])
        await trainer.give_back(40)
        await server.up()
        assert [(one.side, one.bytes) for one in queue._turns.look().holders] == [("engine", 100), ("trainer", 40)]
        for _ in range(2):
            await trainer.take(200)
            assert queue.registered["s0"].asleep
            assert not queue.registered["s0"].accepting
            await trainer.give_back()
            await awake(server, queue)
        assert server.engine.sleeps[0] == 1
        assert all(report.total_bytes <= BUDGET and report.used <= report.bytes for report in queue._turns.reports)
        assert len(server.engines) == 1
    assert holding(queue) == []


async def test_answers_in_flight_continue_after_the_turn(
    client: RolloutClient, queue: RunQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From their last token, under the weights that the trainer has published meanwhile. Its turn is no time of theirs:
    neither of these, nor of one that begins in it."""
    async with trainer_of(queue) as trainer, rollout_server(queue, tmp_path, turn=settings(), token_s=0.02) as server:
        (answer,) = await begun(client, [ask(CONTEXT, 100)])
        await trainer.take(200)
        await server.until(lambda: server.engine.running == 0)
        await until(client._router.asleep)
        client.timeout_s = 60.0
        other = asyncio.create_task(client.generate(ask(CONTEXT, 5)))
        await asyncio.sleep(0.1)
        later = SimpleNamespace(monotonic=lambda: time.monotonic() + 300.0)  # more than either of them may take
        monkeypatch.setattr("penstock.rollout_server.client.client.time", later)
        await asyncio.sleep(2.0)
        assert not other.done()
        queue.announce(1)
        await trainer.give_back()
        found = await answer
        assert (await other).token_ids == fake_answer(CONTEXT, 5, version=1)
    (_, _, cut), *_ = found.version_spans
    assert [version for version, _, _ in found.version_spans] == [0, 1]
    assert found.resumed == 1
    first = fake_answer(CONTEXT, cut)
    assert found.token_ids == first + fake_answer(CONTEXT + first, 100 - cut, version=1)


async def test_request_that_waits_for_a_slot_does_not_reach_an_engine_that_sleeps(
    client: RolloutClient, queue: RunQueue, tmp_path: Path
) -> None:
    job = {"config": small_config(max_concurrent=1), "turn": settings(), "token_s": 0.1}
    async with trainer_of(queue) as trainer, rollout_server(queue, tmp_path, **job) as server:
        answers = [asyncio.create_task(client.generate(ask([one, *CONTEXT], 200))) for one in (1, 2)]
        await server.status("/health", lambda found: found["in_flight"] == 2)
        await server.until(lambda: server.engine.running == 1)
        asked = server.engine.asked
        await trainer.take(200)
        await server.status("/health", lambda found: found["in_flight"] == 0)
        assert server.engine.asked == asked
        server.engine.token_s = 0.001
        await trainer.give_back()
        for one, answer in enumerate(await asyncio.gather(*answers), 1):
            assert answer.token_ids == fake_answer([one, *CONTEXT], 200)


async def test_an_engine_that_dies_asleep_is_replaced_in_the_next_turn(queue: RunQueue, tmp_path: Path) -> None:
    async with trainer_of(queue) as trainer, rollout_server(queue, tmp_path, turn=settings()) as server:
        await trainer.take(200)
        server.engine.crash()
        await server.until(lambda: len(server.engines) == 2)
        assert server.engine.asked == 0
        assert holding(queue) == ["trainer"]
        await trainer.give_back()
        await server.until(lambda: queue.registered["s0"].accepting)
        assert holding(queue) == ["engine"]


async def test_an_engine_that_cannot_sleep_is_ended_for_the_trainer(queue: RunQueue, tmp_path: Path) -> None:
    async with trainer_of(queue) as trainer, rollout_server(queue, tmp_path, turn=settings()) as server:
        server.engine.crash()  # between two looks at its health
        async with asyncio.timeout(PATIENCE_S):
            await trainer.take(200)
        await trainer.give_back()
        await server.until(lambda: len(server.engines) == 2 and queue.registered["s0"].accepting)


async def test_a_trainer_that_is_killed_gives_its_turn_back(queue: RunQueue, tmp_path: Path) -> None:
    async with rollout_server(queue, tmp_path, turn=settings()) as server:
        killed = TurnCall("trainer", "killed", 1, holds=True, ttl_s=15.0, bytes=200)
        await server.until(lambda: bool(queue._turns.take(killed)) and not queue.registered["s0"].accepting)
        await server.until(lambda: bool(queue._turns.take(replace(killed, number=2)).fence))
        queue.clock.now += 20.0
        await awake(server, queue)


async def test_dropped_weights_are_loaded_again_before_anything_is_sampled(queue: RunQueue, tmp_path: Path) -> None:
    """Under level 2 also where no newer version came; the model itself, which is announced nowhere, is not dropped."""
    async with trainer_of(queue) as trainer, rollout_server(queue, tmp_path, turn=settings(2)) as server:
        for announced in (None, 1, None):
            await trainer.take(200)
            if announced:
                queue.announce(announced)
            await trainer.give_back()
            await awake(server, queue)
        assert server.engine.sleeps == [2, 1, 1, 2]
        assert server.engine.loaded == [1, 1]


async def test_an_engine_over_the_budget_ends_the_server(queue: RunQueue, tmp_path: Path) -> None:
    small = TurnSettings(budget=99, ttl_s=0.5)
    async with rollout_server(queue, tmp_path, turn=small, up=False) as server:
        with pytest.raises(OverBudget, match="99"):
            await asyncio.wait_for(server.task, PATIENCE_S)


async def test_a_queue_that_is_away_changes_nothing(queue: RunQueue, tmp_path: Path) -> None:
    slow = partial(FakeEngine, token_s=0.01)
    async with (
        trainer_of(queue) as trainer,
        rollout_server(queue, tmp_path, turn=settings(), new_engine=slow) as server,
    ):
        await trainer.take(200)
        queue.down = True
        await asyncio.sleep(1.0)
        assert (trainer.holds, len(server.engines)) == (True, 1)
        queue.down = False
        await trainer.give_back()
        await awake(server, queue)
        assert len(server.engines) == 1
