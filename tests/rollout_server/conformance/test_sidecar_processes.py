"""Three processes of a sidecar before a real server: versions over swaps, one of the processes killed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.rollout_server.conformance.subject import PROMPT, SGLANG, VLLM, Subject, prompt
from tests.rollout_server.conftest import TOKEN, Mount, Reference, StubQueue, ask, begun, rollout_server

from penstock.rollout_server import Generation, RolloutClient
from penstock.rollout_server.engines import NoFollowers
from penstock.transfer_queue import Announcement

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(900)]
PROCESSES = 3
ANSWERS = 6
LENGTH = 500


@pytest.mark.deep
@pytest.mark.parametrize("subject", [VLLM, SGLANG], indirect=True)
async def test_every_process_labels_its_tokens_rightly(
    subject: Subject, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token's logprob is that of a plain forward pass of the version that its span names."""
    engine, queue, mount = subject.engine, StubQueue(), Mount()
    weights: dict[int, dict[str, Any]] = {}
    borrow(monkeypatch, engine)

    def announce(tensors: dict[str, Any]) -> int:
        version = next(subject.versions)
        weights[version] = tensors
        queue.announced = Announcement(version, reference.publish(version, tensors).as_dict())
        return version

    announce(reference.other(1))
    config = engine.config.model_copy(update={"sidecar_processes": PROCESSES})
    async with (
        subject.pausing("recompute"),
        rollout_server(
            queue, tmp_path, new_engine=lambda *_: engine, model=subject.model, config=config, mount=mount
        ) as server,
    ):
        beside = mount.sidecar.beside.processes
        await server.until(lambda: all(process.begun for process in beside))
        client = RolloutClient(queue, TOKEN, 200.0)
        try:
            asked = await begun(client, [ask(prompt(n), LENGTH) for n in range(ANSWERS)])
            for tensors in (reference.other(2), reference.other(3)):
                version = announce(tensors)
                await server.until(lambda wanted=version: queue.registered["s0"].version == wanted)
            os.kill(beside[0].pid, signal.SIGKILL)
            answers = await asyncio.gather(*asked)
        finally:
            await client.close()
        version = announce(reference.first)
        await server.until(lambda: queue.registered["s0"].version == version)
    subject.holds_first = False
    for number, found in enumerate(answers):
        check(subject, reference, weights, prompt(number), found)
    assert {version for found in answers for version, _, _ in found.version_spans} == set(list(weights)[:3])
    assert any(found.resumed for found in answers)
    assert await engine.healthy()
    assert len((await subject.asked_in_one(ask(PROMPT, 4, temperature=0.0)))[0]) == 4


def borrow(monkeypatch: pytest.MonkeyPatch, engine: Any) -> None:
    """A server may use the engine of all tests, and neither starts nor ends it."""

    async def start() -> Any:
        return engine.info.model_copy(update={"version": engine.weights.version})

    async def stop() -> None:
        engine.share(NoFollowers())

    monkeypatch.setattr(engine, "start", start)
    monkeypatch.setattr(engine, "stop", stop)


def check(
    subject: Subject, reference: Reference, weights: dict[int, dict[str, Any]], context: list[int], found: Generation
) -> None:
    assert len(found.token_ids) == LENGTH
    for version, start, end in found.version_spans:
        reference.use(weights[version])
        expected = reference.logprobs(context, found.token_ids)
        subject.close(found.logprobs[start:end], expected[start:end])
