"""Client, sidecar and the real hf engine together: updates and a kill -9 under load."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.rollout_server.conftest import (
    VOCAB,
    Reference,
    RunningServer,
    RunQueue,
    begun,
    check_answer,
    rollout_server,
    small_config,
)

from penstock.rollout_server import GenerateRequest, Generation, RolloutClient, Sampling
from penstock.rollout_server.engines.hf.engine import HFEngine
from penstock.transfer_queue import Announcement

pytestmark = [pytest.mark.torch]
LENGTH = 800
"""Tokens of an answer: enough that it is still being sampled when the engine is stopped or loads a version."""
PROMPT = [(7 * i + 3) % VOCAB for i in range(40)]


@pytest.fixture
async def server(queue: RunQueue, tiny_model: str, tmp_path: Path) -> AsyncIterator[RunningServer]:
    config = small_config(max_model_len=1024, kv_cache_tokens=16384)
    job = {"config": config, "model": tiny_model, "new_engine": HFEngine}
    async with rollout_server(queue, tmp_path / "logs", **job) as running:
        yield running


def ask(i: int, count: int) -> GenerateRequest:
    sampling = Sampling(max_new_tokens=count, seed=i)
    return GenerateRequest(token_ids=PROMPT[i:], sampling=sampling, episode_id=f"e{i}")


async def ask_all(client: RolloutClient, count: int) -> list[Generation]:
    return check_all(await asyncio.gather(*[client.generate(ask(i, count)) for i in range(12)]), count)


def check_all(answers: list[Generation], count: int) -> list[Generation]:
    for answer in answers:
        check_answer(answer.token_ids, answer.logprobs, answer.version_spans)
        assert len(answer.token_ids) == count
    return answers


@pytest.mark.deep
async def test_updates_under_load_interrupt_nobody(
    server: RunningServer, client: RolloutClient, reference: Reference
) -> None:
    for first in (1, 3, 5, 7):  # on a busy machine the answers may be whole before a version is there
        versions = range(first, first + 2)
        manifests = [reference.publish(version, reference.other(version)) for version in versions]
        asking = await begun(client, [ask(i, LENGTH) for i in range(12)])
        for manifest in manifests:
            server.queue.announced = Announcement(manifest.version, manifest.as_dict())
            await server.until(lambda wanted=manifest.version: server.queue.registered["s0"].version == wanted)
        answers = check_all(await asyncio.gather(*asking), LENGTH)
        continued = sum(answer.continued_over_update for answer in answers)
        updates = server.queue.reported[first - 1 :]
        in_flight = max(update.in_flight for update in updates)
        assert all(answer.resumed == 0 for answer in answers)
        assert [update.version for update in updates] == [*versions]
        if min(continued, in_flight) >= 6:
            break
    assert continued >= 6
    assert in_flight >= 6


@pytest.mark.crash
async def test_a_killed_engine_comes_back_with_the_newest_weights_and_answers_are_token_exact(
    server: RunningServer, client: RolloutClient, reference: Reference
) -> None:
    """Seeded noise hangs on the position: an answer that was cut and resumed must equal one that was not."""
    server.queue.announced = Announcement(1, reference.publish(1, reference.other(1)).as_dict())
    await server.until(lambda: server.queue.registered["s0"].version == 1)
    whole = await ask_all(client, LENGTH)
    asking = await begun(client, [ask(i, LENGTH) for i in range(12)])
    os.kill(server.engine.process.pid, signal.SIGKILL)
    cut = await asyncio.gather(*asking)
    assert len(server.engines) == 2
    assert [answer.resumed for answer in cut] == [1] * 12
    for before, after in zip(whole, cut, strict=True):
        assert after.token_ids == before.token_ids
        assert after.logprobs == pytest.approx(before.logprobs, abs=2e-5)
        assert after.version_spans == [(1, 0, LENGTH)]


@pytest.mark.deep
@pytest.mark.crash
async def test_a_hung_engine_is_started_again_and_nobody_notices_but_by_the_clock(
    server: RunningServer, client: RolloutClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP: the process lives, answers nothing and obeys no SIGTERM."""
    monkeypatch.setattr("penstock.rollout_server.engines.child_link.STOP_S", 1.0)
    whole = await ask_all(client, LENGTH)
    asking = await begun(client, [ask(i, LENGTH) for i in range(12)])
    os.kill(server.engine.process.pid, signal.SIGSTOP)
    cut = await asyncio.gather(*asking)
    assert len(server.engines) == 2
    assert not server.engines[0].alive
    assert [answer.token_ids for answer in cut] == [answer.token_ids for answer in whole]
    assert {answer.resumed for answer in cut} == {1}


async def test_client_goes_on_with_what_an_answer_aborted_at_a_swap_has(
    queue: RunQueue, client: RolloutClient, tiny_model: str, tmp_path: Path, reference: Reference
) -> None:
    config = small_config(pause="abort", max_model_len=2048, kv_cache_tokens=16384)
    length, manifest = 1200, reference.publish(1, reference.other(1)).as_dict()
    job = {"config": config, "model": tiny_model, "new_engine": HFEngine}
    async with rollout_server(queue, tmp_path / "logs", **job) as server:
        asking = await begun(client, [ask(i, length) for i in range(6)])
        queue.announced = Announcement(1, manifest)
        answers = check_all(await asyncio.gather(*asking), length)
    assert [update.in_flight for update in queue.reported] == [0]
    assert len(server.engines) == 1
    for i, answer in enumerate(answers):
        assert (answer.finish_reason, answer.resumed) == ("length", 1)
        assert [version for version, _, _ in answer.version_spans] == [0, 1]
        swap = answer.version_spans[1][1]
        before = reference.logprobs(PROMPT[i:], answer.token_ids[:swap])
        assert answer.logprobs[:swap] == pytest.approx(before, abs=2e-5)
    reference.use(reference.other(1))
    for i, answer in enumerate(answers):
        swap = answer.version_spans[1][1]
        after = reference.logprobs(PROMPT[i:], answer.token_ids)[swap:]
        assert answer.logprobs[swap:] == pytest.approx(after, abs=2e-5)
