"""A server for evaluations: one policy version samples all of an evaluation, and nobody else waits for it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import AsyncMock

import pytest
from tests.rollout_server.conftest import RunningServer, RunQueue, ask, rollout_server

from penstock.rollout_server import GenerateRequest, Generation, RolloutClient
from penstock.rollout_server.server.registration import QueueConnection
from penstock.rollout_server.server.request_queue import TooOld
from penstock.rollout_server.server.version_pin import VersionPin
from penstock.transfer_queue import Status

BUSY = {"queued": 3, "leased": 1, "done": 0}
OVER = {"queued": 0, "leased": 0, "done": 4}
WHILE_IT_COULD_PULL_S = 0.8
"""Some five looks at the queue."""


@pytest.fixture
async def server(queue: RunQueue, tmp_path: Path) -> AsyncIterator[RunningServer]:
    async with rollout_server(queue, tmp_path, token_s=0.002, evaluates=True) as running:
        yield running


def evaluating(tokens: int, min_version: int = 0) -> GenerateRequest:
    return ask([1, 2, 3], tokens).model_copy(update={"split": "eval/0", "min_version": min_version})


def versions(answer: Generation) -> set[int]:
    return {version for version, _, _ in answer.version_spans}


async def test_it_stays_while_an_evaluation_is_on_and_goes_on_after_it(
    queue: RunQueue, server: RunningServer, client: RolloutClient
) -> None:
    queue.splits["eval/0"] = BUSY
    answering = asyncio.create_task(client.generate(evaluating(60)))
    for version in (1, 2):
        queue.announce(version)
        await asyncio.sleep(WHILE_IT_COULD_PULL_S)
    assert server.engine.version == 0
    assert versions(await answering) == {0}
    assert versions(await client.generate(evaluating(9))) == {0}, "the episode's next turn, too"
    queue.splits["eval/0"] = OVER
    await server.until(lambda: server.engine.version == 2)
    assert versions(await client.generate(evaluating(9))) == {2}


async def test_it_stays_while_an_answer_is_in_flight(
    queue: RunQueue, server: RunningServer, client: RolloutClient
) -> None:
    """Also if the queue counts its evaluation as over."""
    answering = asyncio.create_task(client.generate(evaluating(300)))
    await server.until(lambda: server.engine.running == 1)
    queue.announce(1)
    assert versions(await answering) == {0}
    await server.until(lambda: server.engine.version == 1)


async def test_no_request_is_admitted_while_the_queue_is_asked(
    queue: RunQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an evaluation that begins meanwhile would have two versions."""
    pin = VersionPin(QueueConnection(queue), lambda: 0)

    async def status() -> Status:
        with pytest.raises(TooOld):
            pin.check()
        return await RunQueue.status(queue)

    monkeypatch.setattr(queue, "status", status)
    assert await pin.may_move(lambda: 0)
    with pytest.raises(TooOld):
        pin.check()
    pin.moved()
    pin.check()


async def test_an_evaluation_of_newer_weights_does_not_hold_it_back(
    queue: RunQueue, server: RunningServer, client: RolloutClient
) -> None:
    """Else that evaluation and the server would wait for each other."""
    queue.splits["eval/1"] = BUSY
    answering = asyncio.create_task(client.generate(evaluating(30, min_version=1)))
    await asyncio.sleep(0.1)
    queue.announce(1)
    assert versions(await answering) == {1}
    queue.announce(2)
    await asyncio.sleep(WHILE_IT_COULD_PULL_S)
    assert server.engine.version == 1


async def test_without_the_queues_word_it_stays(
    queue: RunQueue, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "status", AsyncMock(side_effect=TimeoutError))
    queue.announce(1)
    await asyncio.sleep(WHILE_IT_COULD_PULL_S)
    assert server.engine.version == 0
    monkeypatch.undo()
    await server.until(lambda: server.engine.version == 1)


async def test_each_goes_to_its_own_server(
    queue: RunQueue, server: RunningServer, client: RolloutClient, tmp_path: Path
) -> None:
    async with rollout_server(queue, tmp_path / "other", name="s1") as other:
        assert await client.best_version() == 0
        for split in ("eval/0", "train", "eval/0", "train"):
            await client.generate(ask([1], 2).model_copy(update={"split": split}))
        assert (server.engine.asked, other.engine.asked) == (2, 2)
        queue.announce(5)
        queue.splits["eval/0"] = BUSY
        await other.until(lambda: queue.registered["s1"].version == 5)
        await asyncio.sleep(0.4)
        assert await client.best_version() == 5, "training is admitted by its own servers' version"
    await asyncio.sleep(0.4)
    assert await client.best_version() is None, "a server for evaluations admits no training"


async def test_server_for_training_waits_for_nobody_and_evaluates_if_there_is_no_other(
    queue: RunQueue, client: RolloutClient, tmp_path: Path
) -> None:
    queue.splits["eval/0"] = BUSY
    async with rollout_server(queue, tmp_path) as server:
        queue.announce(1)
        await server.until(lambda: server.engine.version == 1)
        await client.generate(evaluating(2))
        assert server.engine.asked == 1


@pytest.mark.parametrize("evaluations", [4, pytest.param(24, marks=pytest.mark.deep)])
async def test_whatever_happens_when_an_evaluation_has_one_version(
    queue: RunQueue, server: RunningServer, client: RolloutClient, evaluations: int
) -> None:
    """Evaluations begin and end at random moments, new weights come all the time."""
    chance = random.Random(0)
    over = asyncio.Event()

    async def publish() -> None:
        version = 0
        while not over.is_set():
            version += 1
            queue.announce(version)
            await asyncio.sleep(chance.uniform(0.0, 0.15))

    async def evaluate(number: int) -> set[int]:
        split = f"eval/{server.engine.version}"
        queue.splits[split] = BUSY
        seen: set[int] = set()
        for _ in range(3):
            await asyncio.sleep(chance.uniform(0.0, 0.1))
            seen |= versions(await client.generate(evaluating(chance.randint(1, 40))))
        queue.splits[split] = OVER
        return seen

    publishing = asyncio.create_task(publish())
    found = []
    for number in range(evaluations):
        found.append(await evaluate(number))
        await asyncio.sleep(chance.uniform(0.0, 0.3))
        if number % 3 == 2:  # on a busy machine it may look at the queue during evaluations alone
            await server.until(lambda before=max(found[-1]): server.engine.version > before)
    over.set()
    await publishing
    assert [len(seen) for seen in found] == [1] * evaluations
    assert len(set().union(*found)) > evaluations // 4, "between evaluations it goes on"
