"""A vision-language model in the hf engine: logprobs of plain forward passes with pixels, swaps, refusals."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.rollout_server.conftest import whole
from tests.rollout_server.engines.hf.test_engine import hf_engine
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
from tests.vision_model import save_vision_model

from penstock.rollout_server import BadRequest, EngineError, EngineInfo, ImageRef, fit_request
from penstock.rollout_server.engines.hf.engine import HFEngine

pytestmark = [pytest.mark.torch]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("torch").set_num_threads(1)
    return save_vision_model(tmp_path_factory.mktemp("tiny-vlm"))


async def test_images_are_seen_and_each_answer_has_the_logprobs_of_a_plain_pass(folder: str, tmp_path: Path) -> None:
    """What does not fit together is refused before, and the next requests are served."""
    async with hf_engine(folder, tmp_path) as engine:
        assert engine.info is not None
        assert engine.info.images
        await refuses(engine)
        asked = [
            (context(6), [RED]),
            (context(6), [GREEN]),
            (context(6, 12), [RED, BLUE]),
            (context(), []),
            (as_a_loop_asks(folder, RED), [RED]),
        ]
        answers = await asyncio.gather(*(whole(engine, ask_about(ids, *images, seed=3)) for ids, images in asked))
        resumed_from = [*asked[2][0], *answers[2].token_ids[:4]]
        resumed = await whole(engine, ask_about(resumed_from, RED, BLUE, count=4, seed=3))
    plain = SeeingReference(folder, tmp_path / "weights")
    for (ids, images), answer in zip(asked, answers, strict=True):
        assert answer.logprobs == pytest.approx(plain.logprobs(ids, images, answer.token_ids), abs=TOLERANCE)
    assert answers[0].logprobs != pytest.approx(answers[1].logprobs, abs=1e-3)
    assert resumed.token_ids == answers[2].token_ids[4:]


async def refuses(engine: HFEngine) -> None:
    wrong = ref(RED).model_copy(update={"sha256": "0" * 64})
    with pytest.raises(BadRequest, match=r"images\.0: .*another sha256"):
        await whole(engine, ask_about(context(6)).model_copy(update={"images": (wrong,)}))
    gone = ImageRef(sha256="0" * 64, url="file:///no/such.png")
    with pytest.raises(BadRequest, match=r"images\.0: cannot be read here"):
        await whole(engine, ask_about(context(6)).model_copy(update={"images": (gone,)}))
    for image in (RED, bomb()):
        with pytest.raises(EngineError, match="failed this request"):
            await whole(engine, ask_about(context(5), image))


def test_a_model_that_takes_no_images_refuses_them_by_name() -> None:
    info = EngineInfo(name="vllm", engine_version="1", version=0, vocab_size=512, max_model_len=64)
    with pytest.raises(BadRequest, match="images: the vllm engine takes none"):
        fit_request(ask_about([1, 2, 3], RED), info)


@pytest.mark.parametrize(("pause", "ended"), [("keep", "length"), ("recompute", "length"), ("abort", "abort")])
async def test_weights_are_swapped_between_two_tokens(folder: str, tmp_path: Path, pause: str, ended: str) -> None:
    import torch
    from transformers import AutoModelForImageTextToText

    from penstock.weight_sync import WeightPublisher

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    tensors = [(name, tensor.detach() * 0.9) for name, tensor in model.named_parameters()]
    manifest = WeightPublisher(tmp_path / "weights", "shm", keep=2).write(1, tensors)
    async with hf_engine(folder, tmp_path, pause=pause) as engine:
        begun = asyncio.Event()
        over = asyncio.create_task(whole(engine, ask_about(context(6), RED, count=400), lambda chunk: begun.set()))
        await begun.wait()
        report = await engine.load_weights(manifest)
        answer = await over
        after = await whole(engine, ask_about(context(6), RED, count=3))
    assert (report.version, answer.finish_reason) == (1, ended)
    assert [version for version, _, _ in answer.version_spans] == ([0] if pause == "abort" else [0, 1])
    assert after.version_spans == [(1, 0, 3)]
