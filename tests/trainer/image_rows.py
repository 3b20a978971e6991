"""Rows with images for a tiny Qwen2.5-VL, the same in every process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tests.vision_model import png, vision_tokenizer

from penstock.trainer import ModelLimits, make_row
from penstock.trainer.batch import Row, number_tokens
from penstock.transfer_queue import Segment

RED, BLUE, NIGHT = png((200, 30, 30)), png((20, 20, 220), (300, 120)), png((5, 5, 5), (90, 60))
SHOWN = [(6, RED), (12, BLUE), (6, NIGHT)]
"""Tokens and bytes of images."""
MIXED = ([0], [1, 0], [], [2], [0, 0, 1])
"""Images of rows, by their places in `SHOWN`."""


def vision_limits() -> ModelLimits:
    return ModelLimits(4096, 400, image_token=vision_tokenizer().convert_tokens_to_ids("<|image_pad|>"))


def prompt_of(shown: Sequence[int]) -> list[int]:
    """A question about these of `SHOWN`."""
    seen = "".join(f"<|vision_start|>{'<|image_pad|>' * SHOWN[n][0]}<|vision_end|>" for n in shown)
    ids: list[int] = vision_tokenizer().encode(f"<|im_start|>user\n{seen}What colour?<|im_end|>\n")
    return ids


def segment_of(prompt: Sequence[int], sampled: Sequence[int], logprobs: Sequence[float]) -> Segment:
    count = len(sampled)
    return Segment(
        prompt_ids=np.array(prompt, dtype=np.int32),
        response_ids=np.array(sampled, dtype=np.int32),
        response_mask=np.ones(count, dtype=np.uint8),
        response_logprobs=np.array(logprobs, dtype=np.float32),
        version_spans=np.array([[0, 0, count]], dtype=np.int32),
        turn_starts=np.zeros(1, dtype=np.int32),
    )


def row_of(shown: Sequence[int], sampled: int, seed: int = 0) -> Row:
    """A prompt with these of `SHOWN`, and as many sampled tokens."""
    ids = np.random.default_rng(seed).integers(20, 300, sampled).tolist()
    segment = segment_of(prompt_of(shown), ids, [-1.0] * sampled)
    return make_row(seed, segment, "", step=0, bound=0, model=vision_limits(), images=[SHOWN[n][1] for n in shown])


def mixed_rows() -> list[Row]:
    """Of other lengths, with one image, two, none, and the same one again."""
    return number_tokens([row_of(these, 5 + 3 * n, seed=n) for n, these in enumerate(MIXED)])
