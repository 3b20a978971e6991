"""What is particular to the vllm engine, on the real server; the conformance suite has the rest."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.rollout_server.conformance.subject import PROMPT, VLLM, Subject, broken_off, prompt
from tests.rollout_server.conftest import Reference, ask, skip_without, whole
from tests.weight_sync.conftest import altered, other_checksum

from penstock.rollout_server import Chunk, EngineError, Generation, RolloutConfig, find_installation
from penstock.rollout_server.engines.vllm.server import environment
from penstock.weight_sync import WeightsRefused

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.timeout(900),
]
only = pytest.mark.parametrize("subject", [VLLM], indirect=True)


@only
async def test_a_request_that_arrives_during_a_swap_waits_and_gets_the_new_version(
    subject: Subject, reference: Reference
) -> None:
    swap = asyncio.create_task(subject.load(reference, reference.first))
    while subject.engine.weights.admission.is_open and not swap.done():
        await asyncio.sleep(0)
    answer = await whole(subject.engine, ask(PROMPT, 6))
    assert answer.version_spans == [(await swap, 0, 6)]


@only
async def test_what_the_worker_itself_refuses_leaves_the_old_weights(
    subject: Subject, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = await subject.load(reference, reference.first)
    tasks = await subject.under_load(2, 1000)
    manifest = altered(reference.publish(next(subject.versions), reference.other(3)), other_checksum)

    @asynccontextmanager
    async def start_only(manifest: Any) -> AsyncIterator[Any]:
        await subject.engine.server.call("POST", "/start_weight_update")
        yield manifest

    monkeypatch.setattr(subject.engine.weights, "_fetch", start_only)
    with pytest.raises(WeightsRefused, match=manifest.tensors[0].name):
        await subject.engine.load_weights(manifest)
    monkeypatch.undo()
    for i, answer in enumerate(await asyncio.gather(*tasks)):
        assert answer.version_spans == [(version, 0, 1000)]
        subject.close(answer.logprobs, reference.logprobs(prompt(i), answer.token_ids))
    assert await subject.engine.healthy()
    await subject.load(reference, reference.first)


@only
async def test_what_the_worker_holds_is_compared_after_the_swap(subject: Subject, reference: Reference) -> None:
    version = await subject.load(reference, reference.other(2))
    deadline = time.monotonic() + 60
    while not (found := re.search(rf"version {version}: (\d+) parameters hold it", subject.engine.stderr_tail())):
        assert time.monotonic() < deadline, subject.engine.stderr_tail()
        await asyncio.sleep(0.1)
    assert int(found[1]) > 0
    await subject.load(reference, reference.first)


@only
async def test_what_is_sampled_before_the_comparison_is_through_is_held_back(
    subject: Subject, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await subject.hold_first(reference)
    new = await subject.publish(reference, reference.other(1))
    weights, compared = subject.engine.weights, asyncio.Event()
    verify = weights._verify

    async def late(fetched: Any) -> None:
        await verify(fetched)
        await compared.wait()

    task, seen = under_way(subject)
    async with asyncio.timeout(180):
        while not seen:
            await asyncio.sleep(0.01)
        monkeypatch.setattr(weights, "_verify", late)  # now that the first version has been compared
        after = (await subject.swap(new)).version
        (stream,) = subject.engine.streams
        at = stream.received
        while stream.received < at + 50:
            await asyncio.sleep(0.01)
        assert seen == {before}
        compared.set()
        answer = await task
    swap = answer.version_spans[0][2]
    assert answer.version_spans == [(before, 0, swap), (after, swap, subject.long)]
    subject.close(answer.logprobs[:swap], reference.logprobs(prompt(0), answer.token_ids[:swap]))
    await subject.load(reference, reference.first)


@only
@pytest.mark.deep
@pytest.mark.ends_engine
async def test_no_token_of_a_version_that_the_worker_does_not_hold_gets_out(
    subject: Subject, reference: Reference
) -> None:
    """The worker's comparison finds the difference by itself: what is not a number equals nothing."""
    before = await subject.hold_first(reference)
    norm = reference.first["model.norm.weight"].clone()
    norm[0] = float("nan")
    manifest = await subject.publish(reference, {**reference.first, "model.norm.weight": norm})
    task, seen = under_way(subject)
    async with asyncio.timeout(180):
        while not seen:
            await asyncio.sleep(0.01)
        await subject.swap(manifest)
        await broken_off([task])
    assert seen == {before}
    assert not await subject.engine.healthy()
    assert "parameter model.norm.weight holds other values" in subject.engine.stderr_tail()


def under_way(subject: Subject) -> tuple[asyncio.Task[Generation], set[int]]:
    """A long answer, and the versions of those of its tokens that came."""
    seen: set[int] = set()

    def note(chunk: Chunk) -> None:
        seen.update(version for version, _, _ in chunk.version_spans)

    return asyncio.create_task(whole(subject.engine, ask(prompt(0), subject.long), note)), seen


WRONG = """
import sys
import torch
from penstock.rollout_server.engines.vllm.worker import say_what_differs
model = torch.nn.Module()
model.norm = torch.nn.Linear(3, 2)
say_what_differs(model, 7, {"norm.weight": model.norm.weight.detach().clone(), "norm.bias": torch.ones(2)}, sys.argv[1])
"""


@pytest.mark.vllm
async def test_a_worker_that_holds_other_values_says_so(tmp_path: Path) -> None:
    await skip_without("vllm")
    installation = await find_installation(RolloutConfig(engine="vllm"))
    done = await asyncio.create_subprocess_exec(
        installation.python, "-c", WRONG, str(tmp_path), env=environment(installation, 1, "key"),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await done.communicate()
    assert b"version 7: parameter norm.bias holds other values" in said, said.decode()
    assert done.returncode == 0
    (verdict,) = tmp_path.iterdir()
    assert "norm.bias" in verdict.read_text()


@only
@pytest.mark.deep
@pytest.mark.ends_engine
async def test_half_a_load_ends_the_server_and_its_open_answers(
    subject: Subject, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.rollout_server.engines.vllm.weights.check_complete", lambda *_: None)
    unknown = {**reference.first, "model.layers.0.unknown.weight": reference.first["model.norm.weight"]}
    manifest = await subject.publish(reference, unknown)
    tasks = await subject.under_load(2)
    with pytest.raises(EngineError):
        await subject.swap(manifest)
    await broken_off(tasks)
    assert not await subject.engine.healthy()
    with pytest.raises(EngineError, match="not running"):
        await whole(subject.engine, ask(PROMPT, 4))
