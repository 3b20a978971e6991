"""With pause=abort an answer ends at a swap, and the client goes on with it: the agent sees one answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.rollout_server.conformance.subject import engine_config, prompt
from tests.rollout_server.conftest import (
    TOKEN,
    Reference,
    RunQueue,
    ask,
    begun,
    check_answer,
    rollout_server,
)
from tests.rollout_server.precision import assert_close, tolerance

from penstock.rollout_server import RolloutClient
from penstock.rollout_server.engines.hf.engine import HFEngine
from penstock.transfer_queue import Announcement

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]
LENGTH = 1200
"""Tokens of an answer: enough that it is still being sampled when the sidecar loads the announced version."""


async def test_the_client_goes_on_with_what_an_aborted_answer_has(
    tiny_model: str, tmp_path: Path, reference: Reference
) -> None:
    queue, config = RunQueue(), engine_config("hf", pause="abort", max_model_len=2048, kv_cache_tokens=16384)
    job = {"config": config, "model": tiny_model, "new_engine": HFEngine}
    client = RolloutClient(queue, TOKEN, timeout_s=200)
    manifest = reference.publish(1, reference.other(1)).as_dict()
    async with rollout_server(queue, tmp_path / "logs", **job) as server:
        asking = await begun(client, [ask(prompt(i), LENGTH) for i in range(6)])
        queue.announced = Announcement(1, manifest)
        answers = await asyncio.gather(*asking)
        await client.close()
    assert [update.in_flight for update in queue.reported] == [0]
    assert len(server.engines) == 1
    for i, answer in enumerate(answers):
        check_answer(answer.token_ids, answer.logprobs, answer.version_spans)
        assert (len(answer.token_ids), answer.finish_reason) == (LENGTH, "length")
        assert [version for version, _, _ in answer.version_spans] == [0, 1]
        assert answer.resumed == 1
        swap = answer.version_spans[1][1]
        before = reference.logprobs(prompt(i), answer.token_ids[:swap])
        assert_close(answer.logprobs[:swap], before, tolerance("hf"))
    reference.use(reference.other(1))
    for i, answer in enumerate(answers):
        swap = answer.version_spans[1][1]
        expected = reference.logprobs(prompt(i), answer.token_ids)[swap:]
        assert_close(answer.logprobs[swap:], expected, tolerance("hf"))
