"""Weights are swapped while requests are in flight: none is lost, and each token says which version sampled it."""

from __future__ import annotations

import asyncio

import pytest
from tests.rollout_server.conformance.subject import PROMPT, Subject, prompt
from tests.rollout_server.conftest import Reference, ask, whole

from penstock.rollout_server import Generation
from penstock.weight_sync import LoadReport

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(900)]
REQUESTS = 6
ATTEMPTS = 8


async def test_keep_marks_every_token_and_goes_on(subject: Subject, reference: Reference) -> None:
    before, report, answers = await swap_under_load(subject, reference)
    assert report.in_flight == REQUESTS
    assert 0.0 < report.load_s <= report.pause_s
    for i, answer in enumerate(answers):
        swap = went_on(answer, before, report.version, subject.long)
        subject.close(answer.logprobs[:swap], reference.logprobs(prompt(i), answer.token_ids[:swap]))
    await holds(subject, reference, 1)


async def test_recompute_goes_on_as_if_the_new_weights_had_always_been(subject: Subject, reference: Reference) -> None:
    async with subject.pausing("recompute") as other:
        before, report, answers = await swap_under_load(other, reference)
        assert report.in_flight == REQUESTS
        swaps = [went_on(answer, before, report.version, other.long) for answer in answers]
        for i, (answer, swap) in enumerate(zip(answers, swaps, strict=True)):
            other.close(answer.logprobs[:swap], reference.logprobs(prompt(i), answer.token_ids[:swap]))
        await holds(other, reference, 1)
        for i, (answer, swap) in enumerate(zip(answers, swaps, strict=True)):
            other.close(answer.logprobs[swap:], reference.logprobs(prompt(i), answer.token_ids)[swap:])


async def test_abort_ends_answers_with_what_they_have(subject: Subject, reference: Reference) -> None:
    async with subject.pausing("abort") as other:
        before, report, answers = await swap_under_load(other, reference)
        assert report.in_flight == 0
        for i, answer in enumerate(answers):
            assert answer.finish_reason == "abort"
            assert 0 < len(answer.token_ids) < other.long
            assert answer.version_spans == [(before, 0, len(answer.token_ids))]
            other.close(answer.logprobs, reference.logprobs(prompt(i), answer.token_ids))
        await holds(other, reference, 1)
        assert await other.running() == 0


@pytest.mark.parametrize("mode", ["keep", "recompute", "abort"])
async def test_requests_that_arrive_during_swaps_are_all_answered(
    subject: Subject, reference: Reference, mode: str
) -> None:
    async with subject.pausing(mode) as other:
        held = [await other.hold_first(reference)]
        tasks: list[asyncio.Task[Generation]] = []
        for seed in (1, 2, 3):
            swap = asyncio.create_task(other.load(reference, reference.other(seed)))
            while not swap.done():
                tasks.append(asyncio.create_task(whole(other.engine, ask(prompt(len(tasks)), 6))))
                await asyncio.sleep(0.02)
            held.append(await swap)
        for answer in await asyncio.gather(*tasks):
            versions = [version for version, _, _ in answer.version_spans]
            assert versions == [version for version in held if version in versions]
            assert len(answer.token_ids) == 6 or (mode, answer.finish_reason) == ("abort", "abort")
        assert (await whole(other.engine, ask(PROMPT, 4))).version_spans == [(held[-1], 0, 4)]


async def test_many_swaps_in_a_row_under_load(subject: Subject, reference: Reference) -> None:
    for _ in range(ATTEMPTS):  # on a busy machine answers may be whole after a broadcast or two
        loaded = [await subject.hold_first(reference)]
        tasks = await subject.under_load(REQUESTS)
        while len(loaded) < 7 and not any(task.done() for task in tasks):
            loaded.append(await subject.load(reference, reference.other(len(loaded))))
            await whole(subject.engine, ask(PROMPT, 3))  # meanwhile every open answer gets a token of this version
        for answer in await asyncio.gather(*tasks):
            seen = [version for version, _, _ in answer.version_spans]
            assert len(answer.token_ids) == subject.long
            assert seen == loaded[: len(seen)]
            assert len(seen) >= len(loaded) - 1
        if len(loaded) >= 3:
            return
    pytest.fail(f"{ATTEMPTS} times answers were whole before two versions were there")


async def swap_under_load(subject: Subject, reference: Reference) -> tuple[int, LoadReport, list[Generation]]:
    """(version before, report, answers) of a swap from the first weights to `other(1)` while all answers went on."""
    for _ in range(ATTEMPTS):  # on a busy machine an answer may be whole before the swap: that says nothing of it
        before = await subject.hold_first(reference)
        new = await subject.publish(reference, reference.other(1))
        tasks = await subject.under_load(REQUESTS)
        report = await subject.swap(new)
        answers = await asyncio.gather(*tasks)
        if all(answer.version_spans != [(before, 0, subject.long)] for answer in answers):
            return before, report, answers
    pytest.fail(f"{ATTEMPTS} times an answer of {subject.long} tokens was whole before the swap")


def went_on(answer: Generation, before: int, after: int, length: int) -> int:
    """Where the versions change; the answer is whole."""
    assert [version for version, _, _ in answer.version_spans] == [before, after]
    assert (len(answer.token_ids), answer.finish_reason) == (length, "length")
    return answer.version_spans[1][1]


async def holds(subject: Subject, reference: Reference, seed: int) -> None:
    """The engine has the weights `other(seed)`; they are the reference's from now on."""
    reference.use(reference.other(seed))
    answer = await whole(subject.engine, ask(PROMPT, 10))
    subject.close(answer.logprobs, reference.logprobs(PROMPT, answer.token_ids))
