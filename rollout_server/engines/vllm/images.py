"""Images as vLLM's token endpoint takes them: exact ids and finished pixels in, nothing is expanded or resized there.

    token_ids   the trajectory's ids, a placeholder per token of an image
    features    mm_placeholders   where each image's placeholders stand
                kwargs_data       its pixels, made by the trainer's own processor (`image_server`)
                mm_hashes         its name in vLLM's caches

vLLM's other way in, `content_parts`, takes encoded images and ids with one placeholder each: its own processor, of
another environment, would make the pixels, and ids that are expanded already would be expanded again, silently.

A name has the request's `cache_salt` before the image's hash: vLLM keeps what its vision tower made of an image by this
name alone, and what older weights made must not meet newer ones.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgpack

from penstock.rollout_server.pictures import SeenImage
from penstock.rollout_server.protocol import BadRequest

MODALITY = "image"
SEEN_KINDS = ("qwen2_5_vl", "qwen3_vl")
"""Values of `model_type` whose pixels are fields of this form in vLLM, tested against the trainer."""


def image_token_of(folder: Path) -> int | None:
    """The id that stands for a part of an image, of a model whose images vLLM is given; None of any other model."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None  # loading the model reports what is wrong with it
    token = config.get("image_token_id")
    return int(token) if config.get("model_type") in SEEN_KINDS and token is not None else None


def packed_item(pixels: bytes, dtype: str, shape: Sequence[int], grid: bytes) -> str:
    """One image's pixels and grid as vLLM serialises them (`MultiModalKwargsItem`), base64.

    `pixels`: [patches, numbers] of `dtype`, named as torch does; `grid`: int64 [3], patches in time, height and width.
    """
    along_patches = ["flat", {"keep_on_cpu": False, "slices": [[[0, shape[0], None]]], "dim": 0}]
    item = {
        "pixel_values": {"data": _tensor(pixels, dtype, shape), "field": along_patches},
        "image_grid_thw": {"data": _tensor(grid, "int64", [3]), "field": ["batched", {"keep_on_cpu": True}]},
    }
    return base64.b64encode(msgpack.packb(item)).decode("ascii")


def _tensor(data: bytes, dtype: str, shape: Sequence[int]) -> list[Any]:
    # vLLM's extension type of msgpack for the bytes of a tensor.
    return [dtype, list(shape), msgpack.ExtType(3, data)]


def places_of(ids: Sequence[int], image_token: int, images: Sequence[SeenImage]) -> list[tuple[int, int]]:
    """(first position, length) of each image's placeholders in `ids`, in order.

    Raises `BadRequest` unless these are all placeholders that there are: vLLM would take others for text.
    """
    places = list(_runs(ids, image_token, images))
    expected = sum(image.tokens for image in images)
    if (count := ids.count(image_token)) != expected:
        raise BadRequest("images", f"token_ids have {count} places for parts of images, the images have {expected}")
    for number, ((first, length), (behind, _)) in enumerate(pairwise([*places, (len(ids), 0)])):
        if first + length > behind or any(ids[at] != image_token for at in range(first, first + length)):
            raise BadRequest(f"images.{number}", f"has {length} tokens, the ids from {first} on have other places")
    return places


def _runs(ids: Sequence[int], image_token: int, images: Sequence[SeenImage]) -> Iterator[tuple[int, int]]:
    at = 0
    for image in images:
        while at < len(ids) and ids[at] != image_token:
            at += 1
        yield at, image.tokens
        at += image.tokens


def features(images: Sequence[SeenImage], places: Sequence[tuple[int, int]], salt: str) -> dict[str, Any]:
    """Field ``features`` of a request's body."""
    ranges = [{"offset": first, "length": length} for first, length in places]
    return {
        "mm_hashes": {MODALITY: [f"{salt}-{image.sha256}" for image in images]},
        "mm_placeholders": {MODALITY: ranges},
        "kwargs_data": {MODALITY: [image.item for image in images]},
    }


def difference(event: Mapping[str, Any], ids: Sequence[int], places: Sequence[tuple[int, int]]) -> str:
    """Difference between the prompt that vLLM reports and the one that it was sent; empty if there is none.

    `event`: the first of an answer to a request with `return_token_ids`.
    """
    if (reported := event.get("prompt_token_ids")) is None:
        return "it does not say on which ids it computes"
    if reported != list(ids):
        at = next((n for n, (one, other) in enumerate(zip(reported, ids, strict=False)) if one != other), len(ids))
        return f"it computes on {len(reported)} ids, {len(ids)} were sent; the first other one is at {at}"
    reported_places = [(one["offset"], one["length"]) for one in (event.get("mm_placeholders") or {}).get(MODALITY, ())]
    return (
        ""
        if reported_places == list(places)
        else f"it has images at {reported_places}, they were sent at {list(places)}"
    )
