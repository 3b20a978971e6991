"""The process that makes pixels of images for an engine whose own processor is another one than the trainer's.

It is our own Python, as the trainer's is: the same version of transformers, the same back end, the same folder, so the
same pixels. Its connection is an inherited socket pair (`child_link`), one JSON object per line both ways:

    in   {"op": "look", "call"} · {"op": "see", "call", "image": {sha256, url}}
    out  {"event": "reply", "call"} · {"event": "reply", "call", "tokens", "item"}
         {"event": "reply", "call", "refused"}    the image cannot be read, or is none; to `look`: no processor

It ends with its owner, whose end of the connection closes.
"""

from __future__ import annotations

import argparse
import io
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.common import uncollected
from penstock.rollout_server.engines.child_link import LINE_LIMIT_BYTES
from penstock.rollout_server.engines.vllm.images import packed_item
from penstock.rollout_server.pictures import read_image
from penstock.rollout_server.protocol import BadRequest, ImageRef

with uncollected():
    import torch

GIVEN = {"pixel_values", "image_grid_thw"}
"""Tensors that the processor has to return for an image."""
FIX = "the model's folder needs preprocessor_config.json, this machine `pip install 'penstock[vision]'`"


class UnknownProcessor(ValueError):
    """The model's image processor cannot be made, or makes other things than `GIVEN`."""


class PixelMaker:
    """One model's image processor."""

    def __init__(self, model: str, dtype: str) -> None:
        """`dtype`: in which pixels are sent; the engine computes in it, its first layer would round them to it."""
        self._model = model
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._processor: Any = None

    def load(self) -> None:
        """Raises `UnknownProcessor`."""
        try:
            from PIL import Image
            from transformers import AutoImageProcessor

            self._processor = AutoImageProcessor.from_pretrained(self._model)
            features = self._processor([Image.new("RGB", (56, 56))], return_tensors="pt")
        except (OSError, ValueError, ImportError) as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UnknownProcessor(f"{self._model}: its image processor cannot be made: {first}; {FIX}") from error
        if set(features) != GIVEN:
            raise UnknownProcessor(
                f"{self._model}: its image processor makes {', '.join(sorted(features))} of an image"
            )

    def see(self, image: bytes) -> tuple[int, str]:
        """(ids that stand for the encoded image, its pixels as `packed_item` has them). Raises `ValueError`."""
        from PIL import Image

        try:
            opened = Image.open(io.BytesIO(image)).convert("RGB")
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            raise ValueError(f"its {len(image)} bytes are no picture: {error}") from error
        features = self._processor([opened], return_tensors="pt")
        values, grid = features["pixel_values"].to(self._dtype), features["image_grid_thw"][0].to(torch.int64)
        tokens = int(grid.prod()) // self._processor.merge_size**2
        dtype = str(values.dtype).removeprefix("torch.")
        return tokens, packed_item(_bytes(values), dtype, list(values.shape), _bytes(grid))


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def answer(maker: PixelMaker, message: Mapping[str, Any]) -> dict[str, Any]:
    """The reply's own fields."""
    try:
        if message["op"] == "look":
            maker.load()
            return {}
        tokens, item = maker.see(read_image(ImageRef(**message["image"])))
    except (BadRequest, UnknownProcessor) as error:
        return {"refused": str(error)}
    except ValueError as error:
        return {"refused": f"image: {error}"}
    if len(item) > LINE_LIMIT_BYTES // 2:
        return {"refused": f"image: its pixels take {len(item) >> 20} MiB, {LINE_LIMIT_BYTES >> 21} at most are sent"}
    return {"tokens": tokens, "item": item}


def main() -> None:
    """``python -m penstock.rollout_server.engines.vllm.image_server --fd N --model M --dtype D --threads T``."""
    parser = argparse.ArgumentParser(prog=Path(__file__).stem)
    parser.add_argument("--fd", type=int, required=True, help="inherited end of a socket pair")
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True, help="float32, bfloat16 or float16")
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    maker = PixelMaker(arguments.model, arguments.dtype)
    with socket.socket(fileno=arguments.fd) as connection, connection.makefile("rwb") as lines:
        for line in lines:
            message = json.loads(line)
            reply = {"event": "reply", "call": message["call"], **answer(maker, message)}
            lines.write(json.dumps(reply, separators=(",", ":")).encode() + b"\n")
            lines.flush()


if __name__ == "__main__":
    main()
