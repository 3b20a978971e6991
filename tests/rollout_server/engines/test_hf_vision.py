"""A vision-language model in the hf engine: logprobs of plain forward passes with pixels, swaps, refusals."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
from pathlib import Path
from typing import Any

import pytest
from tests.rollout_server.conftest import whole
from tests.rollout_server.engines.test_hf import hf_engine
from tests.vision_model import png, save_vision_model, vision_tokenizer

from penstock.agent_loops import AgentConfig
from penstock.agent_loops.chat import chat_of
from penstock.rollout_server import (
    BadRequest,
    EngineError,
    EngineInfo,
    GenerateRequest,
    ImageRef,
    Sampling,
    fit_request,
)
from penstock.rollout_server.engines import HFEngine

pytestmark = [pytest.mark.torch]
RED, BLUE = png((200, 30, 30)), png((20, 20, 220), (300, 120))
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("torch").set_num_threads(1)
    return save_vision_model(tmp_path_factory.mktemp("tiny-vlm"))


def ref(data: bytes) -> ImageRef:
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return ImageRef(sha256=hashlib.sha256(data).hexdigest(), url=url)


def context(*tokens: int) -> list[int]:
    """A prompt with one image per number, which is how many tokens it has."""
    text = "".join(f"<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>" for count in tokens)
    ids: list[int] = vision_tokenizer().encode(f"<|im_start|>user\n{text}What colour?<|im_end|>\n")
    return ids


def as_a_loop_asks(folder: str, image: bytes) -> list[int]:
    """The ids that an agent's chat makes of it for this very model."""
    parts = [{"type": "image", "image": ref(image).url}, {"type": "text", "text": "What colour?"}]
    segment = chat_of(folder, AgentConfig()).start([{"role": "user", "content": parts}])
    assert segment.images == [ref(image)]
    return segment.context()


def ask(ids: list[int], *images: bytes, count: int = 8, **sampling: Any) -> GenerateRequest:
    refs = tuple(ref(data) for data in images)
    return GenerateRequest(token_ids=ids, images=refs, sampling=Sampling(max_new_tokens=count, **sampling))


def plain_logprobs(folder: str, ids: list[int], images: list[bytes], sampled: list[int]) -> list[float]:
    """One pass over everything, pixels with it, without a cache."""
    import torch
    from PIL import Image
    from transformers import AutoImageProcessor, AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    every = torch.tensor([ids + sampled])
    seen: dict[str, Any] = {}
    if images:
        opened = [Image.open(io.BytesIO(data)) for data in images]
        seen = dict(AutoImageProcessor.from_pretrained(folder)(opened, return_tensors="pt"))
        seen["mm_token_type_ids"] = (every == model.config.image_token_id).int()
    with torch.no_grad():
        scores = model(every, **seen).logits[0, len(ids) - 1 : -1].float().log_softmax(-1)
    return scores.gather(1, torch.tensor(sampled).unsqueeze(1)).squeeze(1).tolist()


async def test_images_are_seen_and_each_answer_has_the_logprobs_of_a_plain_pass(folder: str, tmp_path: Path) -> None:
    """What does not fit together is refused before, and the next requests are served."""
    async with hf_engine(folder, tmp_path) as engine:
        assert engine.info is not None
        assert engine.info.images
        await refuses(engine)
        asked = [
            (context(6), [RED]),
            (context(6), [png((20, 220, 20))]),
            (context(6, 12), [RED, BLUE]),
            (context(), []),
            (as_a_loop_asks(folder, RED), [RED]),
        ]
        answers = await asyncio.gather(*(whole(engine, ask(ids, *images, seed=3)) for ids, images in asked))
        resumed_from = [*asked[2][0], *answers[2].token_ids[:4]]
        resumed = await whole(engine, ask(resumed_from, RED, BLUE, count=4, seed=3))
    for (ids, images), answer in zip(asked, answers, strict=True):
        assert answer.logprobs == pytest.approx(plain_logprobs(folder, ids, images, answer.token_ids), abs=TOLERANCE)
    assert answers[0].logprobs != pytest.approx(answers[1].logprobs, abs=1e-3)
    assert resumed.token_ids == answers[2].token_ids[4:]


def bomb() -> bytes:
    """Few bytes, more pixels than Pillow opens: its error for that is an error of its own kind."""
    from PIL import Image

    written = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(written, "png")
    return written.getvalue()


async def refuses(engine: HFEngine) -> None:
    wrong = ref(RED).model_copy(update={"sha256": "0" * 64})
    with pytest.raises(BadRequest, match=r"images\.0: .*another sha256"):
        await whole(engine, ask(context(6)).model_copy(update={"images": (wrong,)}))
    gone = ImageRef(sha256="0" * 64, url="file:///no/such.png")
    with pytest.raises(BadRequest, match=r"images\.0: cannot be read here"):
        await whole(engine, ask(context(6)).model_copy(update={"images": (gone,)}))
    for image in (RED, bomb()):
        with pytest.raises(EngineError, match="failed this request"):
            await whole(engine, ask(context(5), image))


def test_a_model_that_takes_no_images_refuses_them_by_name() -> None:
    info = EngineInfo(name="vllm", engine_version="1", version=0, vocab_size=512, max_model_len=64)
    with pytest.raises(BadRequest, match="images: the vllm engine takes none"):
        fit_request(ask([1, 2, 3], RED), info)


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
        over = asyncio.create_task(whole(engine, ask(context(6), RED, count=400), lambda chunk: begun.set()))
        await begun.wait()
        report = await engine.load_weights(manifest)
        answer = await over
        after = await whole(engine, ask(context(6), RED, count=3))
    assert (report.version, answer.finish_reason) == (1, ended)
    assert [version for version, _, _ in answer.version_spans] == ([0] if pause == "abort" else [0, 1])
    assert after.version_spans == [(1, 0, 3)]
