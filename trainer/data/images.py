"""Images of trajectories: which models are trained with them, reading and verifying bytes, keeping them for people.

Trajectory.images ─► images_by_segment ─► `Row.images`, encoded            recorded ones ─► RUN/images/SHA256
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from penstock.common import Backoff, write_atomically
from penstock.rollout_server import BadRequest, ImageRef, read_images
from penstock.transfer_queue import EpisodeImages

FOLDER = "images"
"""Folder of a run with the images of its recorded trajectories, each once, named by the sha256 of its bytes."""


READS, READ_AGAIN = 3, Backoff(0.5, 2.0)
"""A file that cannot be read after so many attempts is gone."""


class UnreadableImages(ValueError):
    """Images of an episode are gone, or not what their names say."""


def sees_images(model: str) -> bool:
    """Return True if `model`, a folder or a hub's name, is loaded for training as a model of images and text.

    A kind that transformers also knows as a causal language model (Gemma 3, Qwen3.5) is trained as that, without
    images. False where the folder does not say: loading it reports the reason.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    try:
        kind = AutoConfig.from_pretrained(model).model_type
    except (ValueError, KeyError, OSError):
        return False
    return kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def encoded_images(images: EpisodeImages) -> list[list[bytes]]:
    """Return the images of each segment in the order of their places, verified against their names. Those that the task
    has in files are read there. Raises `UnreadableImages`.
    """
    data = _read_all(images)
    return [[data[name] for name in names] for names in images.by_segment]


def keep_images(images: EpisodeImages, folder: Path) -> None:
    """Each in a separate file, unless that exists already. Raises `UnreadableImages`, `OSError`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in _read_all(images).items():
        if not (folder / name).exists():
            write_atomically(folder / name, data)


def _read_again(images: Sequence[ImageRef]) -> list[bytes]:
    """Read `images`; a disk or a network that fails may come back. Blocks between reads: its callers are in threads.

    Raises `BadRequest`, `ValueError`.
    """
    pauses = READ_AGAIN.pauses()
    while True:
        try:
            return read_images(images)
        except BadRequest as error:
            if not isinstance(error.__cause__, OSError) or pauses.failures == READS - 1:
                raise
            time.sleep(pauses.next_s())


def _read_all(images: EpisodeImages) -> dict[str, bytes]:
    """Return all images by name."""
    try:
        refs = [ImageRef(sha256=name, url=url) for name, url in images.urls.items()]
        read = _read_again(refs)
    except (BadRequest, ValueError) as error:
        raise UnreadableImages(f"{error}: files that a dataset names must stay until its run is over") from error
    for name, data in images.data.items():
        if sha256(data).hexdigest() != name:
            raise UnreadableImages(f"an image has other bytes than its name {name} says")
    return {**images.data, **dict(zip(images.urls, read, strict=True))}
