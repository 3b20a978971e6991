"""Two data-parallel engines behind one server: each answers, and both have the version that answers name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from tests.rollout_server.conformance.subject import Subject, prompt
from tests.rollout_server.conftest import Reference, ask, members, skip_without, whole
from tests.rollout_server.engines.test_tensor_parallel import (
    ENGINES,
    TOLERANCE,
    check_answer,
    ran_ns,
    title,
    update_under_load,
)

pytest.importorskip("torch")

TWO_ENGINES: dict[str, dict[str, Any]] = {
    "vllm": {"vllm_args": {"data_parallel_size": 2}},
    "sglang": {"sglang_args": {"dp_size": 2}},
}
PROCESS = {"vllm": "EngineCore", "sglang": "scheduler"}
"""Part of the title of an engine's process."""
PROMPTS = 6
pytestmark = [
    pytest.mark.deep,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600, func_only=True),  # the start has a deadline of its own
]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES)
async def server(
    request: pytest.FixtureRequest, tiny_model: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Subject]:
    name: str = request.param
    await skip_without(name)
    logs = tmp_path_factory.mktemp("logs")
    started = await Subject.start(f"{name}+broadcast", tiny_model, logs, start_timeout_s=500.0, **TWO_ENGINES[name])
    try:
        yield started
    finally:
        await started.stop()


@pytest.fixture(params=["file", "broadcast"])
def subject(request: pytest.FixtureRequest, server: Subject) -> Subject:
    """The server, whose versions come by this transport."""
    return replace(server, trainer=None) if request.param == "file" else server


def engines(subject: Subject) -> list[int]:
    return [pid for pid in members(subject.process_group) if PROCESS[subject.name] in title(pid)]


async def check_holds(subject: Subject, reference: Reference, version: int) -> None:
    """Answers at once, so that both engines give some."""
    before = [ran_ns(pid) for pid in engines(subject)]
    answers = await asyncio.gather(*(whole(subject.engine, ask(prompt(i), 60)) for i in range(PROMPTS)))
    for i, answer in enumerate(answers):
        assert answer.version_spans == [(version, 0, 60)]
        assert answer.logprobs == pytest.approx(reference.logprobs(prompt(i), answer.token_ids), abs=TOLERANCE)
    ran = [ran_ns(pid) - earlier for pid, earlier in zip(engines(subject), before, strict=True)]
    assert len(ran) == 2
    assert min(ran) > max(ran) / 10, "one engine gave all answers"


async def test_an_update_under_load_reaches_both_engines(subject: Subject, reference: Reference) -> None:
    version = await subject.load(reference, reference.first)
    await check_holds(subject, reference, version)
    for seed in (1, 2):
        before, weights = version, reference.other(seed)
        answers, version = await update_under_load(subject, reference, weights)
        for i, answer in answers:
            check_answer(reference, i, answer, before, version)
        reference.use(weights)
        await check_holds(subject, reference, version)
