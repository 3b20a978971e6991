"""What vLLM is given of images, and what it says of it, without vLLM."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
from pathlib import Path
from typing import Any

import msgpack
import pytest
from tests.rollout_server.engines.http.test_stream import fed
from tests.rollout_server.seeing import BLUE, RED, bomb, ref
from tests.vision_model import noise, save_vision_processor

from penstock.rollout_server import BadRequest, EngineError, RolloutConfig
from penstock.rollout_server.engines.vllm.image_reader import ImageReader
from penstock.rollout_server.engines.vllm.image_server import PixelMaker
from penstock.rollout_server.engines.vllm.images import SEEN_KINDS, features, image_token_of, packed_item, places_of
from penstock.rollout_server.pictures import SeenImage

PAD = 9
TWO, THREE = SeenImage("aa", 2, "item of two"), SeenImage("bb", 3, "item of three")


@pytest.mark.parametrize(
    ("ids", "images", "places"),
    [
        ([1, PAD, PAD, 2], [TWO], [(1, 2)]),
        ([PAD, PAD, 2, PAD, PAD, PAD], [TWO, THREE], [(0, 2), (3, 3)]),
        ([1, *[PAD] * 5, 2], [THREE, TWO], [(1, 3), (4, 2)]),
        ([PAD, PAD, 1, PAD, PAD], [TWO, TWO], [(0, 2), (3, 2)]),
    ],
)
def test_places_are_where_the_placeholders_stand(
    ids: list[int], images: list[SeenImage], places: list[tuple[int, int]]
) -> None:
    assert places_of(ids, PAD, images) == places


@pytest.mark.parametrize(
    ("ids", "images", "why"),
    [
        ([1, PAD, 2], [TWO], "images: token_ids have 1 places"),
        ([1, PAD, PAD, PAD], [TWO], "images: token_ids have 3 places"),
        ([PAD, PAD, 1, PAD, PAD], [TWO], "images: token_ids have 4 places"),
        ([1, 2], [TWO], "images: token_ids have 0 places"),
        ([PAD, 1, PAD], [TWO], r"images\.0: has 2 tokens, the ids from 0"),
        ([PAD, PAD, 1, PAD, 2, PAD, PAD], [TWO, THREE], r"images\.1: has 3 tokens, the ids from 3"),
    ],
)
def test_places_that_differ_are_refused(ids: list[int], images: list[SeenImage], why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        places_of(ids, PAD, images)


def test_features_name_images_by_weights_and_content() -> None:
    assert features([TWO, THREE], [(1, 2), (5, 3)], "v3-1") == {
        "mm_hashes": {"image": ["v3-1-aa", "v3-1-bb"]},
        "mm_placeholders": {"image": [{"offset": 1, "length": 2}, {"offset": 5, "length": 3}]},
        "kwargs_data": {"image": ["item of two", "item of three"]},
    }


def test_image_token_is_of_models_that_vllm_is_given_images_of(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    assert image_token_of(tmp_path) is None
    for kind in (*SEEN_KINDS, "gemma3"):
        config.write_text(json.dumps({"model_type": kind, "image_token_id": 7, "vision_config": {}}))
        assert image_token_of(tmp_path) == (7 if kind in SEEN_KINDS else None)


ITEM_OF_VLLM = (
    "gq5pbWFnZV9ncmlkX3Rod4KkZGF0YZOlaW50NjSRA8cYAwEAAAAAAAAAAgAAAAAAAAABAAAAAAAAAKVmaWVsZJKnYmF0Y2hlZIGr"
    "a2VlcF9vbl9jcHXDrHBpeGVsX3ZhbHVlc4KkZGF0YZOnZmxvYXQzMpICA8cYAwAAAD8AAIC/AAAAQAAAAAAAAGBAAACAvqVmaWVs"
    "ZJKkZmxhdIOra2VlcF9vbl9jcHXCpnNsaWNlc5GRkwACwKNkaW0A"
)
"""Recorded: two patches of three numbers, a grid of 1, 2, 1, by vLLM 0.32's own encoder."""


def test_packed_item_is_as_vllm_encodes_it() -> None:
    import numpy as np

    pixels = np.array([[0.5, -1.0, 2.0], [0.0, 3.5, -0.25]], dtype="<f4").tobytes()
    grid = np.array([1, 2, 1], dtype="<i8").tobytes()
    found = unpacked(packed_item(pixels, "float32", [2, 3], grid))
    assert found == unpacked(ITEM_OF_VLLM)


def unpacked(item: str) -> Any:
    return msgpack.unpackb(base64.b64decode(item))


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pixels_are_the_trainers(tmp_path: Path, dtype: str) -> None:
    """Of any size and form, bit for bit."""
    torch = pytest.importorskip("torch")
    from PIL import Image
    from transformers import AutoImageProcessor

    folder = save_vision_processor(tmp_path)
    maker = PixelMaker(folder, dtype)
    maker.load()
    processor = AutoImageProcessor.from_pretrained(folder)
    pictures = [RED, BLUE, *(noise((31 + 17 * n, 200 - 13 * n), n, kind) for n, kind in enumerate(["PNG", "JPEG"] * 3))]
    for picture in pictures:
        tokens, item = maker.see(picture)
        made = processor([Image.open(io.BytesIO(picture)).convert("RGB")], return_tensors="pt")
        name, shape, values = unpacked(item)["pixel_values"]["data"]
        assert (name, shape) == (dtype, list(made["pixel_values"].shape))
        found = torch.frombuffer(bytearray(values.data), dtype=getattr(torch, dtype)).view(shape)
        assert torch.equal(found, made["pixel_values"].to(found.dtype))
        grid = torch.frombuffer(bytearray(unpacked(item)["image_grid_thw"]["data"][2].data), dtype=torch.int64)
        assert torch.equal(grid, made["image_grid_thw"][0])
        assert tokens == int(grid.prod()) // 4


@pytest.mark.torch
def test_pixels_of_no_picture_are_refused(tmp_path: Path) -> None:
    maker = PixelMaker(save_vision_processor(tmp_path), "float32")
    maker.load()
    for data in (b"no picture", bomb()):
        with pytest.raises(ValueError, match="no picture"):
            maker.see(data)


@pytest.mark.deep
@pytest.mark.torch
async def test_reader_keeps_images_and_says_when_it_is_gone(tmp_path: Path) -> None:
    folder = save_vision_processor(tmp_path)
    reader = ImageReader(RolloutConfig(engine="vllm"), folder, tmp_path / "logs")
    await reader.start()
    try:
        first = await reader.read([ref(RED), ref(BLUE), ref(RED)])
        assert [image.tokens for image in first] == [6, 12, 6]
        assert first[0] is first[2]
        with pytest.raises(BadRequest, match=r"images\.1: its .* bytes are no picture"):
            await reader.read([ref(RED), ref(b"none")])
        assert reader.is_linked
        os.kill(reader.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="reads images is gone") as lost:
            await reader.read([ref(noise((50, 50), 1))])
        assert lost.value.retryable
        assert not reader.is_linked
        assert await reader.read([ref(BLUE)]) == [first[1]]
    finally:
        await reader.stop()


@pytest.mark.deep
@pytest.mark.torch
async def test_reader_of_a_model_without_processor_says_the_fix(tmp_path: Path) -> None:
    reader = ImageReader(RolloutConfig(engine="vllm"), str(tmp_path), tmp_path / "logs")
    with pytest.raises(EngineError, match=r"preprocessor_config\.json") as refused:
        await reader.start()
    assert not refused.value.retryable
    assert not reader.is_linked


SENT = [1, PAD, PAD, 2]
TOLD = {"prompt_token_ids": SENT, "mm_placeholders": {"image": [{"offset": 1, "length": 2}]}}


async def first_tokens(told: dict[str, Any]) -> list[int]:
    """Of an answer whose first event says this of its prompt."""
    async with fed("vllm") as one:
        one.stream.prove(SENT, [(1, 2)])
        chunks = await one.send(one.event([5]) | told, one.event([6], "stop", [(0, 0, 2)])).over()
    return [token for chunk in chunks for token in chunk.token_ids]


async def test_prompt_that_vllm_computed_on_is_proven() -> None:
    assert await first_tokens(TOLD) == [5, 6]


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({}, "does not say on which ids"),
        (
            TOLD | {"prompt_token_ids": [1, PAD, PAD, PAD, 2]},
            "computes on 5 ids, 4 were sent; the first other one is at 3",
        ),
        (TOLD | {"mm_placeholders": None}, r"images at \[\]"),
        (TOLD | {"mm_placeholders": {"image": [{"offset": 1, "length": 1}]}}, r"images at \[\(1, 1\)\]"),
    ],
)
async def test_prompt_of_other_ids_gives_no_token(told: dict[str, Any], why: str) -> None:
    with pytest.raises(EngineError, match=why) as refused:
        await first_tokens(told)
    assert not refused.value.retryable
