"""Two ranks of a real server: each keeps its share of what is loaded, and none is left behind by a refusal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.rollout_server.conformance.subject import PROMPT, Subject, prompt
from tests.rollout_server.conftest import Reference, ask, members, skip_without, whole

pytest.importorskip("torch")

from tests.weight_sync.conftest import altered

from penstock.rollout_server import Generation
from penstock.weight_sync import Merger, WeightPublisher, WeightsRefused

TWO_RANKS: dict[str, dict[str, Any]] = {
    "vllm": {"vllm_args": {"tensor_parallel_size": 2}},
    "sglang": {"sglang_args": {"tp_size": 2}},
}
ENGINES = [pytest.param("vllm", marks=pytest.mark.vllm), pytest.param("sglang", marks=pytest.mark.sglang)]
LONG = 600
"""Tokens of an answer around an update: more than a load lasts at most times, and asked for again until it is in."""
pytestmark = [
    pytest.mark.deep,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600, func_only=True),  # the start has a deadline of its own
]
TOLERANCE = 2e-4
RAN_NS = 4_000_000
"""What a slow rank runs at a time, of half a second."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES)
async def server(
    request: pytest.FixtureRequest, tiny_model: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Subject]:
    """One for both transports: a member of broadcasts reads files as well."""
    name: str = request.param
    await skip_without(name)
    logs = tmp_path_factory.mktemp("logs")
    started = await Subject.start(f"{name}+broadcast", tiny_model, logs, start_timeout_s=500.0, **TWO_RANKS[name])
    try:
        yield started
    finally:
        await started.stop()


@pytest.fixture(params=["file", "broadcast"])
def subject(request: pytest.FixtureRequest, server: Subject) -> Subject:
    """The server, whose versions come by this transport."""
    return replace(server, trainer=None) if request.param == "file" else server


async def check_holds(subject: Subject, reference: Any, version: int) -> None:
    """Logprobs need every rank's share of every layer: one rank of another version would show."""
    answer = await whole(subject.engine, ask(PROMPT, 40))
    assert answer.version_spans == [(version, 0, 40)]
    assert answer.logprobs == pytest.approx(reference.logprobs(PROMPT, answer.token_ids), abs=TOLERANCE)


async def check_goes_on(subject: Subject, reference: Reference, process_group: int) -> None:
    """The same processes load the next version, on both ranks."""
    assert await subject.engine.healthy()
    assert subject.process_group == process_group
    version = await subject.load(reference, reference.other(3))
    reference.use(reference.other(3))
    await check_holds(subject, reference, version)


async def test_an_update_under_load_reaches_both_ranks(subject: Subject, reference: Reference) -> None:
    version = await subject.load(reference, reference.first)
    await check_holds(subject, reference, version)
    crossed = 0
    for seed in range(1, 6):  # on a busy machine a load may fall between two answers
        before, weights = version, reference.other(seed)
        answers, version = await update_under_load(subject, reference, weights)
        crossed = sum(check_answer(reference, i, answer, before, version) for i, answer in answers)
        reference.use(weights)
        await check_holds(subject, reference, version)
        if crossed:
            break
    assert crossed >= 1


async def update_under_load(
    subject: Subject, reference: Reference, weights: dict[str, Any]
) -> tuple[list[tuple[int, Generation]], int]:
    """Answers to `prompt(i)` around the update, each with its i, and the version of the update."""
    loaded = asyncio.Event()

    async def keep_busy(i: int, first: asyncio.Task[Generation]) -> list[tuple[int, Generation]]:
        """Answers to one prompt, one after another, until the update is in: a load may outlast any one of them."""
        found = [(i, await first)]
        while not loaded.is_set():
            found.append((i, await whole(subject.engine, ask(prompt(i), LONG))))
        return found

    tasks = [asyncio.create_task(keep_busy(i, first)) for i, first in enumerate(await subject.under_load(3, LONG))]
    report = await subject.swap(await subject.publish(reference, weights))
    loaded.set()
    return [answer for found in await asyncio.gather(*tasks) for answer in found], report.version


def check_answer(reference: Reference, i: int, answer: Generation, before: int, after: int) -> bool:
    """Whether the answer crosses the swap. The reference has the weights of `before`."""
    versions = [version for version, _, _ in answer.version_spans]
    assert versions in ([before], [before, after], [after])
    swap = answer.version_spans[0][2] if versions[0] == before else 0
    old = reference.logprobs(prompt(i), answer.token_ids[:swap])
    assert answer.logprobs[:swap] == pytest.approx(old, abs=TOLERANCE)
    return len(versions) == 2


async def test_an_adapter_is_loaded_by_both_ranks(subject: Subject, tiny_model: str, tmp_path: Path) -> None:
    """On tied embeddings: the model's head is its embedding."""
    pytest.importorskip("peft")
    from tests.rollout_server.peft_policy import PeftPolicy

    policy = PeftPolicy(tiny_model)
    publisher = WeightPublisher(tmp_path / "published", "shm", model=Path(tiny_model))
    merger = Merger(Path(tiny_model), tmp_path / "merged", "float32")
    for seed in range(2):
        policy.train(3, seed)
        version = next(subject.versions)
        adapter = publisher.write_adapter(version, policy.tensors().items(), policy.config())
        await subject.engine.load_weights(merger.merge(adapter))
        await check_holds(subject, policy, version)


async def test_a_damaged_file_leaves_both_ranks_on_the_old_weights(subject: Subject, reference: Reference) -> None:
    version, processes = await subject.load(reference, reference.first), subject.process_group
    tasks = await subject.under_load(2, 400)
    for cut in (True, False):
        manifest = reference.publish(next(subject.versions), reference.other(2))
        path = Path(manifest.place)
        data = bytearray(path.read_bytes())
        data[-2] ^= 0xFF
        path.write_bytes(data[:-100] if cut else data)
        with pytest.raises(WeightsRefused, match=path.name if cut else manifest.tensors[-1].name):
            await subject.engine.load_weights(manifest)
        await check_holds(subject, reference, version)
    for answer in await asyncio.gather(*tasks):
        assert answer.version_spans == [(version, 0, 400)]
    await check_goes_on(subject, reference, processes)


async def test_a_load_waits_for_a_rank_that_reads_slowly(subject: Subject, reference: Reference) -> None:
    """The file is the trainer's and the sidecar's to delete once the load has returned."""
    await subject.load(reference, reference.first)
    processes = subject.process_group
    (second,) = [pid for pid in members(processes) if "TP1" in title(pid)]
    slowed = asyncio.create_task(slow_down(second))
    try:
        version = await subject.load(reference, reference.other(4))
    finally:
        slowed.cancel()
        await asyncio.wait([slowed])
    reference.use(reference.other(4))
    await check_holds(subject, reference, version)
    await check_goes_on(subject, reference, processes)


async def slow_down(pid: int) -> None:
    """It runs a hundredth of the time, until cancelled."""
    try:
        while True:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0.5)
            ran = ran_ns(pid)
            os.kill(pid, signal.SIGCONT)
            for _ in range(20):  # a busy machine may not let it run at once
                await asyncio.sleep(0.005)
                if ran_ns(pid) - ran >= RAN_NS:
                    break
    finally:
        os.kill(pid, signal.SIGCONT)


def ran_ns(pid: int) -> int:
    """How long its threads have run. Only of those that are there: one that ended counts no more."""
    found = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += int((task / "schedstat").read_text().split()[0])
    return found


@pytest.mark.parametrize("rank", [0, 1])
async def test_what_one_rank_alone_refuses_is_loaded_by_none(subject: Subject, reference: Reference, rank: int) -> None:
    if subject.name != "vllm":
        pytest.skip("the sidecar reads for SGLang: its ranks are shown a file that was verified")
    version, processes = await subject.load(reference, reference.first), subject.process_group
    manifest = reference.publish(next(subject.versions), reference.other(2))
    (other,) = [pid for pid in members(processes) if f"Worker_TP{1 - rank}" in title(pid)]
    place = f"/proc/self/task/{other}/root{manifest.place}"  # there in that process only
    manifest = altered(manifest, lambda plain: plain.update(path=place))
    with pytest.raises(WeightsRefused, match="No such file"):
        await subject.engine.load_weights(manifest)
    await check_holds(subject, reference, version)
    await check_goes_on(subject, reference, processes)


def title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
