"""Requests with images, on every engine that takes them: one suite, each engine started once.

Every answer's logprobs are those of a plain pass of transformers over the very ids and the trainer's pixels.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.rollout_server.conformance.subject import Subject, sets
from tests.rollout_server.conftest import skip_without, whole
from tests.rollout_server.seeing import (
    BLUE,
    GREEN,
    RED,
    SeeingReference,
    as_a_loop_asks,
    ask_about,
    bomb,
    context,
    ref,
)
from tests.vision_model import noise, save_vision_model

from penstock.rollout_server import BadRequest, EngineError, EngineInfo, Generation, ImageRef, fit_request

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]
VLLM = pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.deep])
SEEING = [pytest.param("hf", marks=pytest.mark.torch), VLLM]
only_vllm = pytest.mark.parametrize("seeing", [VLLM], indirect=True)
TOLERANCE = 2e-4
"""Largest |logprob − plain forward pass| in float32."""
LONG = {"hf": 400, "vllm": 500}
"""Tokens of an answer that is still under way when weights arrive."""
ATTEMPTS = 8
OTHER = 1e-2
"""Another image, or other weights, change a logprob by more."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("torch").set_num_threads(1)
    return save_vision_model(tmp_path_factory.mktemp("tiny-vlm"), head_dim=32)


@pytest.fixture
def plain(folder: str, tmp_path: Path) -> SeeingReference:
    return SeeingReference(folder, tmp_path / "weights")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seeings() -> AsyncIterator[dict[str, Subject]]:
    """The engines that are running, by name."""
    running: dict[str, Subject] = {}
    yield running
    every = [one for started in running.values() for one in (started, *started.others.values())]
    await asyncio.gather(*(one.stop() for one in every))


@pytest_asyncio.fixture(loop_scope="module", params=SEEING)
async def seeing(
    request: pytest.FixtureRequest,
    seeings: dict[str, Subject],
    folder: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Subject:
    name: str = request.param
    await skip_without(name)
    if name not in seeings:
        seeings[name] = await Subject.start(name, folder, tmp_path_factory.mktemp("logs"))
    assert seeings[name].info.images
    return seeings[name]


def close(found: list[float], expected: list[float]) -> None:
    assert found == pytest.approx(expected, abs=TOLERANCE)


async def look(subject: Subject, *images: bytes, count: int = 8, **sampling: Any) -> Generation:
    """Of two pictures, the second one is wide."""
    ids = context(*(6 if image is not BLUE else 12 for image in images))
    return await whole(subject.engine, ask_about(ids, *images, count=count, **sampling))


async def test_pictures_have_plain_logprobs(seeing: Subject, plain: SeeingReference, folder: str) -> None:
    await seeing.hold_first(plain)  # type: ignore[arg-type]
    asked = [
        (context(6), [RED]),
        (context(6), [GREEN]),
        (context(6, 12, 6), [RED, BLUE, RED]),
        (context(), []),
        (as_a_loop_asks(folder, RED), [RED]),
    ]
    requests = [ask_about(ids, *images, temperature=0.0) for ids, images in asked]
    answers = await asyncio.gather(*(whole(seeing.engine, request) for request in requests))
    for (ids, images), answer in zip(asked, answers, strict=True):
        close(answer.logprobs, plain.logprobs(ids, images, answer.token_ids))
    assert answers[0].logprobs != pytest.approx(answers[1].logprobs, abs=OTHER)
    resumed_from = [*asked[2][0], *answers[2].token_ids[:4]]
    resumed = await whole(seeing.engine, ask_about(resumed_from, *asked[2][1], count=4, temperature=0.0))
    assert resumed.token_ids == answers[2].token_ids[4:]


async def test_pictures_of_any_size_and_number(seeing: Subject, plain: SeeingReference) -> None:
    """Token and pixel exactness: what the processor makes of them is what the engine computed on."""
    await seeing.hold_first(plain)  # type: ignore[arg-type]
    drawn = random.Random(5)
    for _ in range(6):
        sizes = [(drawn.randint(28, 220), drawn.randint(28, 220)) for _ in range(drawn.randint(1, 3))]
        images = [noise(size, seed=drawn.randint(0, 99), kind=drawn.choice(["PNG", "JPEG"])) for size in sizes]
        ids = context(*(plain.tokens(image) for image in images))
        answer = await whole(seeing.engine, ask_about(ids, *images, count=3, temperature=0.0))
        close(answer.logprobs, plain.logprobs(ids, images, answer.token_ids))


async def test_pictures_that_do_not_fit_are_refused(seeing: Subject, plain: SeeingReference) -> None:
    """By name, and the next request is served."""
    wrong = ref(RED).model_copy(update={"sha256": "0" * 64})
    gone = ImageRef(sha256="0" * 64, url="file:///no/such.png")
    for image, why in ((wrong, "another sha256"), (gone, "cannot be read here")):
        with pytest.raises(BadRequest, match=rf"images\.0: .*{why}"):
            await whole(seeing.engine, ask_about(context(6)).model_copy(update={"images": (image,)}))
    for ids, images in ((context(5), [RED]), (context(6, 6), [RED]), (context(6), [RED, RED]), (context(6), [bomb()])):
        with pytest.raises(EngineError) as refused:
            await whole(seeing.engine, ask_about(ids, *images))
        assert seeing.name == "hf" or isinstance(refused.value, BadRequest)
    assert (await look(seeing, RED)).token_ids


async def test_pictures_under_new_weights(seeing: Subject, plain: SeeingReference) -> None:
    """By file, by changes alone, by broadcast; the same picture as before, whose old features no cache may give."""
    before = (await look(seeing, RED, temperature=0.0)).logprobs
    tower = plain.other(1, "visual")
    assert 0 < sum(not tower[name].equal(plain.first[name]) for name in tower) < len(tower)
    for number, tensors in enumerate((plain.first, tower, plain.other(2), plain.other(3))):
        if number == 3:
            await seeing._join(seeing.logs / "published")
        version = await seeing.load(plain, tensors)
        plain.use(tensors)
        for images in ([RED], [RED, BLUE]):
            answer = await look(seeing, *images, temperature=0.0)
            assert answer.version_spans == [(version, 0, 8)]
            ids = context(*[6, 12][: len(images)])
            close(answer.logprobs, plain.logprobs(ids, images, answer.token_ids))
            if number and images == [RED]:
                assert answer.logprobs != pytest.approx(before, abs=OTHER)
                before = answer.logprobs
    assert [manifest.base_version is None for manifest in plain.published] == [True, False, True]


@only_vllm
async def test_pictures_worker_compares_tower_and_text(seeing: Subject, plain: SeeingReference) -> None:
    """Embeddings, norms and the tower's patches keep their form; on CPUs linear layers are packed."""
    version = await seeing.load(plain, plain.other(4))
    found = None
    async with asyncio.timeout(60):
        while found is None:
            said = rf"version {version}: (\d+) parameters hold it, (\d+) cannot be compared([^\n]*)"
            found = re.search(said, seeing.engine.stderr_tail())
            await asyncio.sleep(0.1)
    assert int(found[1]) > 4, "norms of two layers"
    assert "unknown to the version" not in found[3]


async def answer_over_a_swap(subject: Subject, plain: SeeingReference, new: dict[str, Any]) -> tuple[Generation, int]:
    """A greedy answer about a red picture, and the version of `new`, which was loaded within it.

    Beside other tests an answer may be whole before the weights are there; then another is asked for.
    """
    request = ask_about(context(6), RED, count=LONG[subject.name], temperature=0.0)
    for _ in range(ATTEMPTS):
        await subject.load(plain, plain.first)
        begun = asyncio.Event()
        task = asyncio.create_task(whole(subject.engine, request, sets(begun)))
        async with asyncio.timeout(120):
            await begun.wait()
            version = await subject.load(plain, new)
            answer = await task
        if len(answer.version_spans) > 1 or answer.finish_reason == "abort":
            return answer, version
    pytest.fail(f"{ATTEMPTS} answers were whole before the weights were there")


@pytest.mark.parametrize("mode", ["keep", "recompute", "abort"])
async def test_pictures_in_flight_at_a_swap(seeing: Subject, plain: SeeingReference, mode: str) -> None:
    new = plain.other(5)
    async with seeing.pausing(mode) as other:
        answer, version = await answer_over_a_swap(other, plain, new)
        assert (await look(other, RED)).version_spans == [(version, 0, 8)]
    swap, sampled = answer.version_spans[0][2], answer.token_ids
    close(answer.logprobs[:swap], plain.logprobs(context(6), [RED], sampled[:swap]))
    if mode == "abort":
        assert (answer.finish_reason, len(answer.version_spans)) == ("abort", 1)
        return
    assert answer.version_spans[1] == (version, swap, LONG[seeing.name])
    plain.use(new)
    if mode == "recompute":  # keys and values of the picture too
        behind = [*context(6), *sampled[:swap]]
        close(answer.logprobs[swap:][:50], plain.logprobs(behind, [RED], sampled[swap:][:50]))


async def test_model_that_takes_no_images_refuses_them_by_name() -> None:
    info = EngineInfo(name="vllm", engine_version="1", version=0, vocab_size=512, max_model_len=64)
    with pytest.raises(BadRequest, match="images: the vllm engine takes none"):
        fit_request(ask_about([1, 2, 3], RED), info)
