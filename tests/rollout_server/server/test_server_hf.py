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


def check_all(answers: list[Generation], count: int) -> list[Generation]:
    for answer in answers:
        check_answer(answer.token_ids, answer.logprobs, answer.version_spans)
        assert len(answer.token_ids) == count
    return answers


@pytest.mark.crash
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.deep)])
async def test_lost_engine_comes_back_with_the_newest_weights_and_answers_are_token_exact(
    server: RunningServer,
    client: RolloutClient,
    reference: Reference,
    number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seeded noise hangs on the position: an answer that was cut and resumed must equal one that was not. After SIGSTOP
    the process lives, answers nothing and obeys no SIGTERM."""
    monkeypatch.setattr("penstock.rollout_server.engines.child_link.STOP_S", 1.0)
    server.queue.announced = Announcement(1, reference.publish(1, reference.other(1)).as_dict())
    await server.until(lambda: server.queue.registered["s0"].version == 1)
    requests = [ask(i, LENGTH) for i in range(12)]
    whole = check_all(await asyncio.gather(*map(client.generate, requests)), LENGTH)
    asking = await begun(client, requests)
    os.kill(server.engine.process.pid, number)
    cut = await asyncio.gather(*asking)
    assert len(server.engines) == 2
    assert not server.engines[0].alive
    for before, after in zip(whole, cut, strict=True):
        assert after.resumed == 1
        assert after.token_ids == before.token_ids
        assert after.logprobs == pytest.approx(before.logprobs, abs=2e-5)
        assert after.version_spans == [(1, 0, LENGTH)]


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
