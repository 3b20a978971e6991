"""The hf engine tells which experts read each token: those that plain forward passes of the same weights choose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

torch = pytest.importorskip("torch")

from tests.rollout_server.conftest import VOCAB, small_config
from tests.rollout_server.routed_mixture import Mixture
from tests.tiny_model import save_tiny_model

from penstock.rollout_server import AnswerBuilder, BadRequest, EngineError, GenerateRequest, Generation, Sampling
from penstock.rollout_server.engines.hf.engine import HFEngine

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300, func_only=True)]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    return Mixture(tmp_path_factory.mktemp("mixture"), tmp_path_factory.mktemp("versions"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(mixture: Mixture, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HFEngine]:
    config = small_config(routing_replay=True, pause="recompute")
    started = HFEngine(config, mixture.folder, tmp_path_factory.mktemp("logs"), 1)
    await started.start()
    try:
        yield started
    finally:
        await started.stop()


async def ask(
    engine: HFEngine,
    context: Sequence[int],
    count: int,
    start: int | None = 0,
    on_first: Callable[[], Coroutine[Any, Any, Any]] | None = None,
) -> Generation:
    """`on_first` runs beside the answer from its first chunk on."""
    beside: list[asyncio.Task[Any]] = []
    request = GenerateRequest(
        token_ids=list(context), sampling=Sampling(max_new_tokens=count), routed_experts_from=start
    )
    answer = AnswerBuilder(request)
    answer.next_request(60.0)
    async for chunk in engine.generate(request):
        answer.add(chunk)
        if on_first is not None and not beside:
            beside.append(asyncio.create_task(on_first()))
    await asyncio.gather(*beside)
    return answer.build()


def check(answer: Generation, context: Sequence[int], mixture: Mixture, version: int, start: int = 0) -> None:
    assert answer.routed_experts is not None
    assert answer.routed_experts.dtype == np.uint8
    expected = mixture.chosen(version, [*context, *answer.token_ids[:-1]])[start:]
    np.testing.assert_array_equal(np.sort(answer.routed_experts, -1), np.sort(expected, -1))


@pytest.mark.asyncio(loop_scope="module")
async def test_rows_are_the_routers_own_choices(engine: HFEngine, mixture: Mixture) -> None:
    """Of several requests in one pass, of a prompt that is known already, and of the second turn alone."""
    assert engine.info is not None
    assert engine.info.routed_experts
    contexts = [[(7 * n + 3 * length) % VOCAB for n in range(length)] for length in (40, 40, 17, 1)]
    for _ in range(2):
        answers = await asyncio.gather(*(ask(engine, context, 12) for context in contexts))
        for answer, context in zip(answers, contexts, strict=True):
            check(answer, context, mixture, 0)
    before = [*contexts[0], *answers[0].token_ids]
    second = [*before, 5, 6, 7]
    check(await ask(engine, second, 9, len(before) - 1), second, mixture, 0, len(before) - 1)
    assert (await ask(engine, contexts[0], 3, None)).routed_experts is None


@pytest.mark.asyncio(loop_scope="module")
async def test_a_token_has_the_experts_of_the_version_that_sampled_it(engine: HFEngine, mixture: Mixture) -> None:
    context = [(5 * n) % VOCAB for n in range(30)]
    for version in range(1, 10):  # a swap may come too late for one answer
        manifest = mixture.publish(version)
        answer = await ask(engine, context, 450, on_first=partial(engine.load_weights, manifest))
        if len(answer.version_spans) > 1:
            break
    assert [span[0] for span in answer.version_spans] == [version - 1, version]
    assert answer.routed_experts is not None
    ids = [*context, *answer.token_ids[:-1]]
    for version, start, end in answer.version_spans:
        chosen = mixture.chosen(version, ids)[len(context) - 1 :]
        found = answer.routed_experts[len(context) - 1 :]
        np.testing.assert_array_equal(np.sort(found[start:end], -1), np.sort(chosen[start:end], -1))


@pytest.mark.parametrize(
    ("kind", "changes", "cause"),
    [
        ("Qwen3", {}, "no layers with experts"),
        ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 16}, "1 experts per token"),
    ],
)
async def test_a_model_without_routes_is_refused_at_start(
    tmp_path: Path, kind: str, changes: dict[str, Any], cause: str
) -> None:
    model = save_tiny_model(tmp_path / "model", kind, **changes)
    engine = HFEngine(small_config(routing_replay=True), model, tmp_path, 1)
    with pytest.raises(EngineError, match=cause) as refused:
        await engine.start()
    assert not refused.value.retryable


async def test_a_request_for_routes_is_refused_where_none_are_recorded(tiny_model: str, tmp_path: Path) -> None:
    engine = HFEngine(small_config(), tiny_model, tmp_path, 1)
    await engine.start()
    try:
        with pytest.raises(BadRequest, match="routing_replay"):
            await ask(engine, [1, 2, 3], 2)
    finally:
        await engine.stop()
