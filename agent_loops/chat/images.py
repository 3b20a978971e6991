"""Images in messages: read once, named by their content, their places in a text widened as the model's processor does.

{"type": "image", "image": PATH or data: URL}      as a loop, a tool (`ToolResult.images`) or a dataset gives it
    ──take──► ImageRef(sha256, url)                 what engines and the trajectory get; pixels are never among the ids
              {…, "image": "sha256:…", "width", "height"}    what the chat template sees
    ──widen──► …<|vision_start|><|image_pad|><|image_pad|>…<|vision_end|>…    a placeholder per token of the image
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from penstock.agent_loops.chat.template import Message
from penstock.agent_loops.errors import TemplateError
from penstock.rollout_server import ImageRef

NAMED = "sha256:"
Part = Mapping[str, Any]


class ImagePlaces:
    """Widens an image's place in a text as the model's processor does. `processor`: of `model_files.load_processor`."""

    def __init__(self, processor: Any) -> None:
        self.token: str = processor.image_token
        self.processor = processor
        self._widened = lru_cache(512)(self._widen_one)

    def widen(self, text: str, parts: Sequence[Part]) -> str:
        """`text` with each image's placeholder as often as the image has tokens. Raises `TemplateError`."""
        if (places := text.count(self.token)) != len(parts):
            raise TemplateError(f"the chat template has {places} places for {len(parts)} images of these messages")
        if not parts:
            return text
        wide = [self._widened(part["width"], part["height"]) for part in parts]
        texts, _ = self.processor.get_text_with_replacements([text], wide)
        return str(texts[0])

    def check(self, encode: Any) -> None:
        """Places are widened as the processor widens them around real pixels. Raises `TemplateError`."""
        from PIL import Image

        images = [Image.effect_noise(size, 64).convert("RGB") for size in ((90, 60), (300, 200))]
        text = f"a {self.token} b {self.token}"
        ids = self.processor(text=[text], images=images)["input_ids"][0]
        if encode(self.widen(text, [{"width": one.width, "height": one.height} for one in images])) != list(ids):
            raise TemplateError("the places of images are widened otherwise than the model's processor does")

    def _widen_one(self, width: int, height: int) -> str:
        """Return the placeholders of an image by its size alone, as engines count them before they have the pixels."""
        from PIL import Image

        try:
            seen = self.processor.image_processor([Image.new("RGB", (width, height))])
        except ValueError as error:
            raise TemplateError(f"the model's processor refuses an image of {width} x {height}: {error}") from error
        return str(self.processor.replace_image_token(seen, image_idx=0))


def take(messages: Sequence[Message], known: dict[str, ImageRef]) -> list[Message]:
    """Messages whose images are named by content; what the names stand for joins `known`. Raises `TemplateError`."""
    named: list[Message] = []
    for message in messages:
        if any(map(_is_image, _parts(message))):
            parts = [_with_image_name(part, known) if _is_image(part) else part for part in _parts(message)]
            named.append({**message, "content": parts})
        else:
            named.append(message)
    return named


def parts_of(messages: Sequence[Message]) -> list[Part]:
    """Returns the image parts in the order in which a template writes them."""
    return [part for message in messages for part in _parts(message) if _is_image(part)]


def with_images(text: str, images: Sequence[str]) -> Any:
    """Content of a message: `text`, or parts if there are images behind it."""
    if not images:
        return text
    return [{"type": "text", "text": text}, *({"type": "image", "image": image} for image in images)]


def files_of(messages: Sequence[Message]) -> set[str]:
    """``file:`` URLs of the images that messages name by a file."""
    named = (_place_of(part) for part in parts_of(messages))
    return {_file_of(where).as_uri() for where in named if isinstance(where, str) and not where.startswith("data:")}


def _parts(message: Message) -> Iterator[Part]:
    content = message.get("content")
    return iter(()) if isinstance(content, str) or content is None else iter(content)


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def _with_image_name(part: Part, known: dict[str, ImageRef]) -> Part:
    where = _place_of(part)
    if not isinstance(where, str):
        raise TemplateError(f"an image is given by a path or a data: URL, not by {where!r}")
    if where.startswith(NAMED):
        return part
    url, data = _read(where)
    width, height = _size(data, where)
    ref = ImageRef(sha256=hashlib.sha256(data).hexdigest(), url=url)
    known[ref.sha256] = ref
    return {"type": "image", "image": NAMED + ref.sha256, "width": width, "height": height}


def _place_of(part: Part) -> Any:
    """Returns the path or URL of the part's image."""
    return part.get("image") or part.get("url") or (part.get("image_url") or {}).get("url")


def _file_of(where: str) -> Path:
    return (Path(unquote(urlsplit(where).path)) if where.startswith("file://") else Path(where)).resolve()


def _read(where: str) -> tuple[str, bytes]:
    """(URL, bytes)"""
    try:
        if where.startswith("data:"):
            return where, base64.b64decode(where.partition(";base64,")[2], validate=True)
        if "://" in where and not where.startswith("file://"):
            raise TemplateError(
                f"image {where[:80]!r}: only files and data: URLs are taken; what a web server gives may be another "
                "image tomorrow, and the trainer must see the same pixels"
            )
        path = _file_of(where)
        return path.as_uri(), path.read_bytes()
    except (OSError, ValueError) as error:
        raise TemplateError(f"image {where[:80]!r} cannot be read: {error}") from error


def _size(data: bytes, where: str) -> tuple[int, int]:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data)) as image:
            return image.size
    except (UnidentifiedImageError, OSError, ValueError, Image.DecompressionBombError) as error:
        raise TemplateError(f"image {where[:80]!r} is none: {error}") from error
