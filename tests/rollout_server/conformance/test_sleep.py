"""The engine hf gives its devices up and has them back: answers end as ``abort``, weights survive or come again."""

from __future__ import annotations

import asyncio

import pytest
from tests.rollout_server.conformance.subject import ENGINES, PROMPT, Subject, prompt
from tests.rollout_server.conftest import Reference, ask, whole

HF = [engine for engine in ENGINES if str(engine.values[0]).startswith("hf")]
pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.parametrize("subject", HF, indirect=True)]


async def test_answers_end_and_the_weights_survive(subject: Subject, reference: Reference) -> None:
    await subject.hold_first(reference)
    awake = await subject.engine.device_bytes()
    for _ in range(8):  # on a busy machine an answer may be whole before its engine sleeps
        answers = await subject.under_load(3)
        async with asyncio.timeout(120):
            await subject.engine.sleep(1)
            ended = await asyncio.gather(*answers)
        if (reasons := {answer.finish_reason for answer in ended}) == {"abort"}:
            break
        await subject.engine.wake()
    assert reasons == {"abort"}
    asleep = await whole(subject.engine, ask(PROMPT, 4))
    assert (asleep.finish_reason, asleep.token_ids) == ("abort", [])
    assert await subject.engine.healthy()
    resting = await subject.engine.device_bytes()
    await subject.engine.wake()
    # An answer continues from its last token, as the client does it.
    context = [*prompt(0), *ended[0].token_ids]
    rest = await whole(subject.engine, ask(context, 8, temperature=0.0))
    assert len(rest.token_ids) == 8
    subject.greedy(reference, context, rest.token_ids)
    if subject.name == "hf":
        assert resting.used == 0
        assert 0 < awake.used <= awake.most == resting.most
        assert 0 < (await subject.engine.device_bytes()).used <= awake.most


async def test_dropped_weights_come_with_the_next_version(subject: Subject, reference: Reference) -> None:
    other = reference.other(7)
    await subject.load(reference, other)
    await subject.engine.sleep(2)
    await subject.engine.wake()
    version = await subject.load(reference, other)
    answer = await whole(subject.engine, ask(PROMPT, 12, temperature=0.0))
    reference.use(other)
    subject.greedy(reference, PROMPT, answer.token_ids)
    assert answer.version_spans == [(version, 0, 12)]
    subject.close(answer.logprobs, reference.logprobs(PROMPT, answer.token_ids))
