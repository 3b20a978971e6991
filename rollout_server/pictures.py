"""Images of requests: their bytes, read and verified, and what an engine is given of them."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from penstock.rollout_server.protocol import BadRequest, ImageRef

MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class SeenImage:
    """One image as it goes into an engine's requests."""

    sha256: str
    """Hash of the encoded image."""
    tokens: int
    """Number of ids that stand for it."""
    item: str
    """Pixels of the image, in the engine's own form."""

    @property
    def nbytes(self) -> int:
        return len(self.item)


def read_images(images: Sequence[ImageRef]) -> list[bytes]:
    """The images' bytes. Raises `BadRequest` naming the one that cannot be read or has other bytes."""
    return [read_image(image, f"images.{position}") for position, image in enumerate(images)]


def read_image(image: ImageRef, field: str = "image") -> bytes:
    """The image's bytes. Raises `BadRequest` naming `field` if they cannot be read, or are others."""
    try:
        data = _bytes_of(image.url)
    except (OSError, ValueError) as error:
        raise BadRequest(field, f"cannot be read here: {error}") from error
    if hashlib.sha256(data).hexdigest() != image.sha256:
        raise BadRequest(field, f"{image.url[:80]} has another sha256 than {image.sha256}")
    return data


def _bytes_of(url: str) -> bytes:
    if url.startswith("data:"):
        return base64.b64decode(url.partition(";base64,")[2], validate=True)
    path = Path(unquote(urlsplit(url).path))
    if not path.is_file() or path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path} is not a file of {MAX_BYTES >> 20} MiB at most")
    return path.read_bytes()
