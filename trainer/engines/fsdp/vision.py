"""The pixels of a pack: encoded images in, what a model of images and text takes in addition to its ids out.

    Pack.images ─► decode, RGB ─► the model's own image processor ─► pixel_values, image_grid_thw
    ids [B, W]  ─► mm_token_type_ids: 1 where an image's part stands, by which the model lays out its 3-D positions
    rows end to end ─► the same positions of each row, and its places before them, [4, 1, L]

The engine reads an image by the same processor, so both sides have the same pixels. They exist while a pack is
computed; the last ones are kept, up to `KEPT_BYTES`, because a pack is computed twice or more in a step.

A model whose images are missing leaves out its vision tower: it would get no gradient, and of several ranks those with
images would wait in collectives that the others never enter. So rows without any image have a blank one behind them,
whose results count for nothing and whose gradients are zeros.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.trainer.job import BadJob

KEPT_BYTES = 256 << 20
GIVEN = {"pixel_values", "image_grid_thw"}
"""Outputs that a processor must have for an image: those of Qwen2-VL and the models after it."""


@dataclass(frozen=True, slots=True)
class Pixels:
    """One image as its model takes it."""

    values: Tensor
    """[patches, numbers] float32"""
    grid: Tensor
    """[1, 3] patches in time, height and width"""
    tokens: int
    """Number of ids that stand for the image."""

    @property
    def nbytes(self) -> int:
        return self.values.nbytes


@dataclass(frozen=True, slots=True)
class SeenRows:
    """Rows end to end, a blank image's last where no other has one. L = all their tokens, R = rows."""

    ids: Tensor
    """[1, L]"""
    positions: Tensor
    """[4, 1, L]"""
    bounds: Tensor
    """[R + 1] int32"""
    lengths: Tensor
    """[R] between them, on the host"""
    arguments: dict[str, Tensor]
    """Pixels and grids"""


class Vision:
    """Reads images for one model. Calls may not overlap."""

    def __init__(
        self, processor: Any, image_token: int, rope_index: Callable[..., Any], kept_bytes: int = KEPT_BYTES
    ) -> None:
        """`processor`: transformers' image processor of the model; `rope_index`: its `get_rope_index`."""
        self.image_token = image_token
        self._rope_index = rope_index
        self._processor = processor
        self._kept_bytes = kept_bytes
        self._cached_pixels: OrderedDict[bytes, Pixels] = OrderedDict()
        self._cached_bytes = 0
        self.blank = self._pixels_of(_blank())

    @classmethod
    def of(cls, model: str, loaded: PreTrainedModel) -> Vision:
        """Return the reader of a model's images. Raises `BadJob` if the folder has no processor, or an unknown one."""
        from transformers import AutoImageProcessor

        image_token = getattr(loaded.config, "image_token_id", None)
        rope_index = getattr(loaded.base_model, "get_rope_index", None)
        if image_token is None or rope_index is None:
            lacking = (
                "image_token_id in its config" if image_token is None else "get_rope_index, which lays positions out"
            )
            raise BadJob(f"{type(loaded).__name__} cannot be trained with images: it has no {lacking}")
        try:
            processor = AutoImageProcessor.from_pretrained(model)
            features = processor([_blank()], return_tensors="pt")
        except (OSError, ValueError, ImportError) as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            fix = "its folder needs preprocessor_config.json, this machine `pip install 'penstock[vision]'`"
            raise BadJob(f"{model} sees images, and its image processor cannot be made: {first}; {fix}") from error
        if set(features) != GIVEN:
            raise BadJob(
                f"{type(loaded).__name__} cannot be trained with images: its processor makes "
                f"{', '.join(sorted(features))} of one, and {', '.join(sorted(GIVEN))} are known here"
            )
        return cls(processor, int(image_token), rope_index)

    def read(self, image: bytes) -> Pixels:
        """Return the pixels of an encoded image. Raises Pillow's errors for bytes that are not an image."""
        from PIL import Image

        pixels = self._cached_pixels.pop(image, None)
        if pixels is None:
            pixels = self._pixels_of(Image.open(io.BytesIO(image)).convert("RGB"))
            self._cached_bytes += pixels.nbytes
        self._cached_pixels[image] = pixels
        while self._cached_bytes > self._kept_bytes and len(self._cached_pixels) > 1:
            self._cached_bytes -= self._cached_pixels.popitem(last=False)[1].nbytes
        return pixels

    def _pixels_of(self, image: Any) -> Pixels:
        features = self._processor([image], return_tensors="pt")
        grid = features["image_grid_thw"]
        return Pixels(features["pixel_values"], grid, int(grid.prod()) // self._processor.merge_size**2)

    def look(self, ids: Tensor, images: Sequence[Sequence[bytes]]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (ids as the model takes them, its other arguments) for lines `ids` [B, W] with their images.

        If no line has an image, one more line [B + 1] has a blank one. An id that stands for a part of an image
        behind the last image was sampled; there is none behind it, and everything from there on is masked, so another
        id takes its place. Raises `ValueError` if a line has fewer places than its images need.
        """
        seen = self._seen(images, len(ids))
        if not any(seen):
            wide = ids.new_zeros(len(ids) + 1, max(ids.shape[1], self.blank.tokens))
            wide[:-1, : ids.shape[1]] = ids
            wide[-1, : self.blank.tokens] = self.image_token
            ids, seen = wide, [*seen, [self.blank]]
        ids, marks = self._marked(ids, seen)
        return ids, {"mm_token_type_ids": marks, **_arguments(seen, ids.device)}

    def look_along(self, rows: Sequence[Tensor], images: Sequence[Sequence[bytes]]) -> SeenRows:
        """Return the result of `look` for rows [T] that lie end to end; each row has its own positions."""
        seen = self._seen(images, len(rows))
        if not any(seen):
            blank = torch.full((self.blank.tokens,), self.image_token, device=rows[0].device, dtype=rows[0].dtype)
            rows, seen = [*rows, blank], [*seen, [self.blank]]
        marked = [self._marked(row[None], [of_row]) for row, of_row in zip(rows, seen, strict=True)]
        places = [self._positions_of(*one, of_row) for one, of_row in zip(marked, seen, strict=True)]
        ids = torch.cat([one for one, _ in marked], dim=1)
        lengths = torch.tensor([*map(len, rows)])
        bounds = torch.nn.functional.pad(lengths.cumsum(0).int(), (1, 0)).to(ids.device)
        return SeenRows(ids, torch.cat(places, dim=2), bounds, lengths, _arguments(seen, ids.device))

    def _seen(self, images: Sequence[Sequence[bytes]], rows: int) -> list[list[Pixels]]:
        return [[self.read(image) for image in of_row] for of_row in images] or [[] for _ in range(rows)]

    def _marked(self, ids: Tensor, seen: Sequence[Sequence[Pixels]]) -> tuple[Tensor, Tensor]:
        """(ids [B, W] without stray places, [B, W] int 1 where an image's part stands)"""
        places = ids == self.image_token
        required = torch.tensor([[sum(one.tokens for one in of_line)] for of_line in seen], device=ids.device)
        if (places.sum(1, keepdim=True) < required).any():
            raise ValueError(
                f"rows have {places.sum(1).tolist()} places for parts of images, their images have "
                f"{required.flatten().tolist()}: do engine and trainer load one image processor?"
            )
        stray = places & (places.cumsum(1) > required)
        return ids.masked_fill(stray, 0), (places & ~stray).int()

    def _positions_of(self, ids: Tensor, marks: Tensor, seen: Sequence[Pixels]) -> Tensor:
        """[4, 1, T]: the place in the row, which separates rows that lie end to end, and the model's own three."""
        plain = torch.arange(ids.shape[1], device=ids.device)[None]
        if not seen:
            return plain.expand(4, 1, -1)
        grid = torch.cat([one.grid for one in seen]).to(ids.device)
        own, _ = self._rope_index(input_ids=ids, mm_token_type_ids=marks, image_grid_thw=grid)
        return torch.cat([plain[None], own])


def _arguments(seen: Sequence[Sequence[Pixels]], device: torch.device) -> dict[str, Tensor]:
    flat = [one for of_row in seen for one in of_row]
    return {
        "pixel_values": torch.cat([one.values for one in flat]).to(device),
        "image_grid_thw": torch.cat([one.grid for one in flat]).to(device),
    }


def _blank() -> Any:
    from PIL import Image

    return Image.new("RGB", (56, 56))
