"""Several adapters of a real peft model at once, on engines that were started for them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from tests.rollout_server.conformance.subject import PROMPT, Subject
from tests.rollout_server.conftest import Reference, skip_without, whole
from tests.rollout_server.precision import ON_GPU, assert_close, tolerance

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from tests.rollout_server.peft_policy import PeftPolicy

from penstock.rollout_server import EngineError, GenerateRequest, Generation, Sampling
from penstock.rollout_server.engines.adapters import ADAPTER_SLOTS, TENSORS
from penstock.rollout_server.protocol import AdapterRef

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Saved:
    """An adapter in a folder, and the model that it belongs to."""

    policy: PeftPolicy
    ref: AdapterRef


def digest_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def save(model: str, folder: Path, seed: int, rank: int = 8) -> Saved:
    policy = PeftPolicy(model, r=rank)
    policy.train(3, seed)
    policy.model.save_pretrained(str(folder))
    return Saved(policy, AdapterRef(sha256=digest_of(folder / TENSORS), folder=str(folder)))


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[
        pytest.param("hf", marks=pytest.mark.torch),
        pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.deep]),
        pytest.param("sglang", marks=[pytest.mark.sglang, pytest.mark.deep]),
    ],
)
async def subject(
    request: pytest.FixtureRequest, tiny_model: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Subject]:
    await skip_without(request.param)
    if request.param == "sglang" and not ON_GPU:
        pytest.skip("SGLang has adapters on GPUs alone")
    started = await Subject.start(request.param, tiny_model, tmp_path_factory.mktemp("logs"), adapter_rank=16)
    yield started
    await started.stop()


@pytest.fixture(scope="module")
def adapters(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> list[Saved]:
    """More than an engine has places for, of several ranks."""
    folder = tmp_path_factory.mktemp("adapters")
    return [save(tiny_model, folder / str(seed), seed, rank=(8, 16, 4)[seed % 3]) for seed in range(ADAPTER_SLOTS + 3)]


async def ask(subject: Subject, adapter: AdapterRef | None) -> Generation:
    request = GenerateRequest(token_ids=PROMPT, sampling=Sampling(max_new_tokens=32), adapter=adapter)
    return await whole(subject.engine, request)


async def check(subject: Subject, saved: Sequence[Saved]) -> list[Generation]:
    """All at once; each answer is of its own model."""
    answers = await asyncio.gather(*(ask(subject, one.ref) for one in saved))
    for one, answer in zip(saved, answers, strict=True):
        expected = one.policy.logprobs(PROMPT, answer.token_ids)
        assert_close(answer.logprobs, expected, tolerance(subject.name, "adapter"))
    return answers


async def test_requests_at_one_time_have_their_own_adapter_or_none(
    subject: Subject, adapters: list[Saved], reference: Reference
) -> None:
    _, base = await asyncio.gather(check(subject, adapters[:4]), ask(subject, None))
    reference.use(reference.first)
    subject.close(base.logprobs, reference.logprobs(PROMPT, base.token_ids))
    for one in adapters[:4]:  # a prefix that another adapter computed is not taken
        await check(subject, [one])


async def test_more_adapters_than_places_take_turns_and_come_back_the_same(
    subject: Subject, adapters: list[Saved]
) -> None:
    for _ in range(2):  # in the second round each is loaded again: its product is added once
        await check(subject, adapters)


async def test_folder_of_other_bytes_fails_its_request_alone(
    subject: Subject, adapters: list[Saved], tmp_path: Path
) -> None:
    first = adapters[0].ref
    torn = tmp_path / "torn"
    torn.mkdir()
    (torn / "adapter_config.json").write_bytes((Path(first.folder) / "adapter_config.json").read_bytes())
    (torn / TENSORS).write_bytes((Path(first.folder) / TENSORS).read_bytes()[:-100])
    wrong = [
        AdapterRef(sha256="1" * 64, folder=str(torn)),
        AdapterRef(sha256=digest_of(torn / TENSORS), folder=str(torn)),
        AdapterRef(sha256="0" * 64, folder=str(tmp_path / "none")),
    ]
    others, *failed = await asyncio.gather(
        check(subject, adapters[:2]), *(ask(subject, one) for one in wrong), return_exceptions=True
    )
    assert isinstance(others, list), others
    assert all(isinstance(one, EngineError) and not one.retryable for one in failed), failed
    await check(subject, adapters[:2])


async def test_answer_that_is_broken_off_gives_its_place_back(subject: Subject, adapters: list[Saved]) -> None:
    for one in adapters:
        stream = subject.engine.generate(
            GenerateRequest(token_ids=PROMPT, sampling=Sampling(max_new_tokens=subject.long), adapter=one.ref)
        )
        await anext(stream)
        await stream.aclose()
    await check(subject, adapters[-1:])
