"""Ids in, ids out: one logprob and one version for each, whatever is asked."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

import pytest
import pytest_asyncio
from tests.rollout_server.conformance.subject import PROMPT, SEEDS, Subject
from tests.rollout_server.conftest import VOCAB, Reference, ask, whole
from tests.rollout_server.precision import common

from penstock.rollout_server import BadRequest, Chunk, GenerateRequest

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(900)]


@pytest_asyncio.fixture(loop_scope="package", autouse=True)
async def first_weights(subject: Subject, reference: Reference) -> None:
    await subject.hold_first(reference)


async def test_it_says_what_it_is(subject: Subject) -> None:
    assert subject.info.name == subject.name
    assert subject.info.version == 0
    assert subject.info.vocab_size == VOCAB
    assert subject.info.max_model_len == subject.engine.config.max_model_len


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
async def test_logprobs_are_those_of_a_plain_forward_pass(
    subject: Subject, reference: Reference, temperature: float
) -> None:
    answer = await whole(subject.engine, ask(PROMPT, 40, temperature=temperature))
    assert len(answer.token_ids) == 40
    assert answer.finish_reason == "length"
    assert len(answer.version_spans) == 1
    subject.close(answer.logprobs, reference.logprobs(PROMPT, answer.token_ids, temperature))


async def test_temperature_zero_is_greedy_with_the_logprobs_of_temperature_one(
    subject: Subject, reference: Reference
) -> None:
    answer = await whole(subject.engine, ask(PROMPT, 12, temperature=0.0))
    assert len(answer.token_ids) == 12
    subject.greedy(reference, PROMPT, answer.token_ids)
    subject.close(answer.logprobs, reference.logprobs(PROMPT, answer.token_ids))


async def test_a_streamed_answer_is_the_one_that_is_not_streamed(subject: Subject) -> None:
    request = ask(PROMPT, 160, temperature=0.0)
    for _ in range(20):
        chunks: list[Chunk] = []
        streamed = await whole(subject.engine, request, chunks.append)
        if len(chunks) > 1:
            break  # else this process had no core while all of it came
    ids, logprobs = await subject.asked_in_one(request)
    assert len(chunks) > 1
    assert all(chunk.finish_reason is None for chunk in chunks[:-1])
    assert len(streamed.token_ids) == len(ids) == 160
    subject.same((streamed.token_ids, streamed.logprobs), (ids, logprobs))


async def test_a_stop_id_ends_the_answer_and_is_its_last_token(subject: Subject, reference: Reference) -> None:
    stops = tuple(range(3, VOCAB, 8))
    answer = await whole(subject.engine, ask(PROMPT, 400, stop_token_ids=stops))
    *before, last = answer.token_ids
    assert answer.finish_reason == "stop"
    assert last in stops
    assert not {*before} & {*stops}
    subject.close(answer.logprobs, reference.logprobs(PROMPT, answer.token_ids))


async def test_the_models_own_eos_stops_nothing_by_itself(subject: Subject) -> None:
    answer = await whole(subject.engine, ask(PROMPT, 300, temperature=2.0))
    assert len(answer.token_ids) == 300


async def test_a_seed_gives_the_same_answer_again_or_is_refused_as_said_at_start(subject: Subject) -> None:
    if subject.name not in SEEDS:
        assert any("seed" in limit for limit in subject.info.limits)
        with pytest.raises(BadRequest) as caught:
            await whole(subject.engine, ask(PROMPT, 4, seed=11))
        assert caught.value.field == "sampling.seed"
        return
    assert not any("seed" in limit for limit in subject.info.limits)
    answers = [await whole(subject.engine, ask(PROMPT, 20, seed=seed)) for seed in (11, 11, 12)]
    first, again, other = (answer.token_ids for answer in answers)
    assert common(first, again) > common(first, other)
    assert subject.rounds or first == again


async def test_top_k_one_is_greedy(subject: Subject, reference: Reference) -> None:
    answer = await whole(subject.engine, ask(PROMPT, 8, temperature=1.0, top_k=1))
    assert len(answer.token_ids) == 8
    subject.greedy(reference, PROMPT, answer.token_ids)


async def test_requests_of_every_kind_together(subject: Subject, reference: Reference) -> None:
    greedy = reference.greedy(PROMPT, 10)
    requests = [
        ask(PROMPT[: 4 + i], 5 + i, temperature=[0.0, 0.5, 1.0, 2.0][i % 4], stop_token_ids=(greedy[9],) * (i % 2))
        for i in range(24)
    ]
    answers = await asyncio.gather(*[whole(subject.engine, request) for request in requests])
    for request, answer in zip(requests, answers, strict=True):
        sampling = request.sampling
        assert len(answer.token_ids) == sampling.max_new_tokens or answer.finish_reason == "stop"
        expected = reference.logprobs(request.token_ids, answer.token_ids, sampling.temperature or 1.0)
        subject.close(answer.logprobs, expected)


async def test_a_closed_generator_frees_the_engine_and_leaves_the_others_alone(
    subject: Subject, reference: Reference
) -> None:
    others = [asyncio.create_task(whole(subject.engine, ask(PROMPT, 120))) for _ in range(4)]
    ends = []
    for _ in range(8):
        async with aclosing(subject.engine.generate(ask(PROMPT, subject.long))) as chunks:
            ends.append((await anext(chunks)).finish_reason)
    assert None in ends, "this process had no core while all of an answer came, and that eight times"
    for answer in await asyncio.gather(*others):
        subject.close(answer.logprobs, reference.logprobs(PROMPT, answer.token_ids))
    deadline = time.monotonic() + 60
    while await subject.running():
        assert time.monotonic() < deadline, "answers that nobody reads are still sampled"
        await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("token_ids", "field", "text"),
    [
        ([VOCAB], "token_ids.0", "512 is outside"),
        ([1, 2, -3], "token_ids.2", "-3 is outside"),
        ([5] * 2048, "token_ids", "2048 tokens leave no room"),
        ([], "token_ids", "is empty"),
    ],
)
async def test_requests_that_can_never_be_served_are_refused_for_good(
    subject: Subject, token_ids: list[int], field: str, text: str
) -> None:
    request = GenerateRequest.model_construct(token_ids=token_ids, sampling=ask([1]).sampling)
    with pytest.raises(BadRequest, match=text) as caught:
        await whole(subject.engine, request)
    assert caught.value.field == field
    assert not caught.value.retryable
    assert (await whole(subject.engine, ask(PROMPT, 2))).finish_reason == "length"


async def test_an_answer_ends_where_the_context_length_does(subject: Subject) -> None:
    answer = await whole(subject.engine, ask([9] * (subject.info.max_model_len - 12), 100))
    assert len(answer.token_ids) == 12
    assert answer.finish_reason == "length"
