"""What every engine must do, tried on real ones. A new engine is one more entry in `ENGINES`.

The engine is started once for the module: each test leaves the first weights loaded, under a higher version.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.rollout_server.conftest import (
    VOCAB,
    Reference,
    ask,
    skip_without_sglang,
    skip_without_vllm,
    small_config,
    whole,
)

from penstock.rollout_server.engines.registry import make_engine
from penstock.rollout_server.protocol import Chunk, Engine, EngineError, GenerateRequest, WeightsRefused

ENGINES = [
    pytest.param("hf", marks=pytest.mark.torch),
    pytest.param("vllm", marks=pytest.mark.vllm),
    pytest.param("sglang", marks=pytest.mark.sglang),
]
SETTINGS: dict[str, dict[str, Any]] = {
    "hf": {},
    "vllm": {"max_model_len": 2048},
    "sglang": {"max_model_len": 2048, "kv_cache_tokens": 20480},
}
"""RolloutConfig changes per engine."""
LONG = {"hf": 450, "vllm": 1950, "sglang": 1950}
"""Tokens of an answer that is still going on when the test has done what it must do meanwhile."""
TOLERANCE = {"hf": 2e-5, "vllm": 1e-4, "sglang": 2e-5}
"""Largest |logprob − plain forward pass| in float32."""
WITHOUT_SEEDS = {"sglang"}
"""Engines that refuse a seed, and say so at start."""

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]
PROMPT = [(7 * i + 3) % VOCAB for i in range(24)]


@dataclass
class Subject:
    """An engine under test."""

    name: str
    engine: Engine
    max_model_len: int
    limits: list[str]
    """What it said at start that it cannot do."""
    versions: itertools.count[int]
    """Versions not used yet."""

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.name]

    @property
    def long(self) -> int:
        return LONG[self.name]

    async def load(self, reference: Reference, tensors: dict[str, Any]) -> int:
        version = next(self.versions)
        report = await self.engine.load_weights(reference.publish(version, tensors))
        assert report.version == version
        return version


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES)
async def subject(
    request: pytest.FixtureRequest, tiny_model: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Subject]:
    name: str = request.param
    if name == "vllm":
        await skip_without_vllm()
    if name == "sglang":
        await skip_without_sglang()
    config = small_config(engine=name, **SETTINGS[name])
    engine = make_engine(config, tiny_model, tmp_path_factory.mktemp("logs"), 0)
    info = await engine.start()
    assert info.version == 0
    assert info.vocab_size == VOCAB
    assert info.max_model_len == config.max_model_len
    try:
        yield Subject(name, engine, config.max_model_len, info.limits, itertools.count(1))
    finally:
        await engine.stop()


def close(found: list[float], expected: list[float], tolerance: float) -> None:
    assert found == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
async def test_logprobs_are_those_of_a_plain_forward_pass(
    subject: Subject, reference: Reference, temperature: float
) -> None:
    answer = await whole(subject.engine, ask(PROMPT, 40, temperature=temperature))
    assert len(answer.token_ids) == 40
    assert answer.finish_reason == "length"
    assert len(answer.version_spans) == 1
    close(answer.logprobs, reference.logprobs(PROMPT, answer.token_ids, temperature), subject.tolerance)


async def test_temperature_zero_is_greedy_with_the_logprobs_of_temperature_one(
    subject: Subject, reference: Reference
) -> None:
    answer = await whole(subject.engine, ask(PROMPT, 12, temperature=0.0))
    assert answer.token_ids == reference.greedy(PROMPT, 12)
    close(answer.logprobs, reference.logprobs(PROMPT, answer.token_ids), subject.tolerance)


async def test_a_stop_id_ends_the_answer_and_is_its_last_token(subject: Subject, reference: Reference) -> None:
    greedy = reference.greedy(PROMPT, 12)
    stop = greedy[6]
    answer = await whole(subject.engine, ask(PROMPT, 12, temperature=0.0, stop_token_ids=(511, stop)))
    assert answer.finish_reason == "stop"
    assert answer.token_ids == greedy[: greedy.index(stop) + 1]


async def test_the_models_own_eos_stops_nothing_by_itself(subject: Subject) -> None:
    answer = await whole(subject.engine, ask(PROMPT, 300, temperature=2.0))
    assert len(answer.token_ids) == 300


async def test_a_seed_gives_the_same_answer_again(subject: Subject) -> None:
    if subject.name in WITHOUT_SEEDS:
        pytest.skip("this engine refuses seeds")
    first = await whole(subject.engine, ask(PROMPT, 20, seed=11))
    again = await whole(subject.engine, ask(PROMPT, 20, seed=11))
    other = await whole(subject.engine, ask(PROMPT, 20, seed=12))
    assert first.token_ids == again.token_ids
    assert first.token_ids != other.token_ids


async def test_a_seed_that_would_not_be_honoured_is_refused(subject: Subject) -> None:
    if subject.name not in WITHOUT_SEEDS:
        pytest.skip("this engine honours seeds")
    assert any("seed" in limit for limit in subject.limits)
    with pytest.raises(EngineError, match=r"sampling\.seed") as caught:
        await whole(subject.engine, ask(PROMPT, 4, seed=11))
    assert not caught.value.retryable


async def test_top_k_one_is_greedy(subject: Subject, reference: Reference) -> None:
    answer = await whole(subject.engine, ask(PROMPT, 8, temperature=1.0, top_k=1))
    assert answer.token_ids == reference.greedy(PROMPT, 8)


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
        close(answer.logprobs, expected, subject.tolerance)


async def test_an_abandoned_answer_does_not_disturb_the_others(subject: Subject, reference: Reference) -> None:
    others = [asyncio.create_task(whole(subject.engine, ask(PROMPT, 120))) for _ in range(4)]
    for _ in range(8):
        async with aclosing(subject.engine.generate(ask(PROMPT, subject.long))) as chunks:
            async for chunk in chunks:
                assert chunk.finish_reason is None
                break
    for answer in await asyncio.gather(*others):
        close(answer.logprobs, reference.logprobs(PROMPT, answer.token_ids), subject.tolerance)
    assert (await whole(subject.engine, ask(PROMPT, 4, temperature=0.0))).token_ids == reference.greedy(PROMPT, 4)


async def test_update_under_load_keeps_every_request_and_marks_every_token(
    subject: Subject, reference: Reference
) -> None:
    before = await subject.load(reference, reference.first)
    first_greedy = await whole(subject.engine, ask(PROMPT, 10, temperature=0.0))
    begun = [asyncio.Event() for _ in range(8)]

    def mark(event: asyncio.Event) -> Any:
        def seen(chunk: Chunk) -> None:
            if chunk.token_ids:
                event.set()

        return seen

    tasks = [asyncio.create_task(whole(subject.engine, ask(PROMPT, subject.long), mark(event))) for event in begun]
    await asyncio.gather(*[event.wait() for event in begun])
    after = next(subject.versions)
    report = await subject.engine.load_weights(reference.publish(after, reference.other(1)))
    answers = await asyncio.gather(*tasks)

    assert report.version == after
    assert report.in_flight == 8
    assert 0.0 < report.load_s <= report.pause_s < 5.0
    for answer in answers:
        assert [version for version, _, _ in answer.version_spans] == [before, after]
        assert len(answer.token_ids) == subject.long
        swap = answer.version_spans[1][1]
        old = reference.logprobs(PROMPT, answer.token_ids[:swap])
        close(answer.logprobs[:swap], old, subject.tolerance)

    changed = await whole(subject.engine, ask(PROMPT, 10, temperature=0.0))
    assert changed.version_spans == [(after, 0, 10)]
    reference.use(reference.other(1))
    assert changed.token_ids == reference.greedy(PROMPT, 10)
    assert changed.token_ids != first_greedy.token_ids
    last = await subject.load(reference, reference.first)
    again = await whole(subject.engine, ask(PROMPT, 10, temperature=0.0))
    assert again.token_ids == first_greedy.token_ids
    assert again.version_spans == [(last, 0, 10)]


def break_checksum(manifest: dict[str, Any]) -> str:
    manifest["tensors"][3]["xxh3"] = "0" * 16
    return manifest["tensors"][3]["name"]


def break_bytes(manifest: dict[str, Any]) -> str:
    path = Path(manifest["path"])
    data = bytearray(path.read_bytes())
    data[-2] ^= 0xFF
    path.write_bytes(data)
    return manifest["tensors"][-1]["name"]


def break_file(manifest: dict[str, Any]) -> str:
    path = Path(manifest["path"])
    path.write_bytes(path.read_bytes()[:-100])
    return path.name


@pytest.mark.parametrize("damage", [break_checksum, break_bytes, break_file])
async def test_damaged_weights_are_refused_by_name_and_the_old_ones_stay(
    subject: Subject, reference: Reference, damage: Any
) -> None:
    version = await subject.load(reference, reference.first)
    manifest = copy.deepcopy(reference.publish(next(subject.versions), reference.other(2)))
    name = damage(manifest)
    with pytest.raises(WeightsRefused, match=name):
        await subject.engine.load_weights(manifest)
    await still_first(subject, reference, version)


async def test_missing_surplus_and_misshapen_tensors_are_refused_by_name(
    subject: Subject, reference: Reference
) -> None:
    version = await subject.load(reference, reference.first)
    name = "model.layers.1.mlp.up_proj.weight"
    missing = {key: value for key, value in reference.first.items() if key != name}
    surplus = {**reference.first, "model.layers.9.mlp.up_proj.weight": reference.first[name]}
    misshapen = {**reference.first, name: reference.first[name][:-1]}
    for tensors, text in ((missing, name), (surplus, "layers.9.mlp"), (misshapen, name)):
        with pytest.raises(WeightsRefused, match=text):
            await subject.engine.load_weights(reference.publish(next(subject.versions), tensors))
    await still_first(subject, reference, version)


async def still_first(subject: Subject, reference: Reference, version: int) -> None:
    answer = await whole(subject.engine, ask(PROMPT, 8, temperature=0.0))
    assert answer.version_spans == [(version, 0, 8)]
    assert answer.token_ids == reference.greedy(PROMPT, 8)
    assert await subject.engine.healthy()


@pytest.mark.parametrize(
    ("token_ids", "text"),
    [
        ([VOCAB], "token_ids.0: 512 is outside"),
        ([1, 2, -3], "token_ids.2: -3"),
        ([5] * 2048, "2048 tokens leave no room"),
    ],
)
async def test_requests_that_can_never_be_served_are_refused_for_good(
    subject: Subject, token_ids: list[int], text: str
) -> None:
    with pytest.raises(EngineError, match=text) as caught:
        await whole(subject.engine, ask(token_ids))
    assert not caught.value.retryable


async def test_an_empty_context_is_refused(subject: Subject) -> None:
    request = GenerateRequest.model_construct(token_ids=[], sampling=ask([1]).sampling)
    with pytest.raises(EngineError, match="token_ids: is empty"):
        await whole(subject.engine, request)


async def test_an_answer_ends_where_the_context_length_does(subject: Subject) -> None:
    answer = await whole(subject.engine, ask([9] * (subject.max_model_len - 12), 100))
    assert len(answer.token_ids) == 12
    assert answer.finish_reason == "length"
