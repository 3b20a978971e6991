"""The column `images` of a dataset, as verl and EasyR1 have it: pictures next to the prompt, `<image>` in their places.

    images   [{"bytes": b"…", "path": "a.png"}, …]      of Hugging Face's `Image`; bytes go before the path
             ["a.png", "data:image/png;base64,…", …]    paths, relative to the dataset's folder
    prompt   [{"role": "user", "content": "<image>Which colour is it?"}]
        ──► content in parts: {"type": "image", "image": FILE or data: URL}, {"type": "text", "text": "Which colour …"}

As there, every `<image>` of a prompt stands for the next picture, in order, and there are as many of the one as of the
other. Content that is in parts already has {"type": "image"} in their places.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

COLUMN = "images"
MARK = "<image>"
MIME = {"PNG": "png", "JPEG": "jpeg", "WEBP": "webp", "GIF": "gif", "BMP": "bmp", "TIFF": "tiff"}


class BadImages(ValueError):
    """The pictures of a row cannot be used; the message names the column and what is wrong."""


def with_pictures(messages: Sequence[Mapping[str, Any]], column: Any, folder: Path) -> list[dict[str, Any]]:
    """`messages` of a row with the pictures of its column in their places. Raises `BadImages`."""
    if not isinstance(column, list | tuple):
        raise BadImages(f"{COLUMN} must be a list of pictures, found {type(column).__name__}")
    places = [_picture(one, f"{COLUMN}[{index}]", folder) for index, one in enumerate(column)]
    pictures = iter(places)
    resolved = [
        {**message, "content": _content(message["content"], pictures)} if "content" in message else dict(message)
        for message in messages
    ]
    marks = sum(_marks(message.get("content")) for message in messages)
    if marks != len(places):
        raise BadImages(f"the prompt has {marks} places for pictures ({MARK}), {COLUMN} has {len(places)}")
    return resolved


def _marks(content: Any) -> int:
    if isinstance(content, str):
        return content.count(MARK)
    return sum(_is_place(part) or str(part.get("text", "")).count(MARK) for part in content or ())


def _content(content: Any, pictures: Iterator[str]) -> Any:
    """Text without places stays text: templates may write it otherwise than a part."""
    if isinstance(content, str):
        return [*_parts(content, pictures)] if MARK in content else content
    return [piece for part in content for piece in _of_part(part, pictures)]


def _of_part(part: Mapping[str, Any], pictures: Iterator[str]) -> Iterator[Mapping[str, Any]]:
    text = part.get("text")
    if _is_place(part):
        yield from _next(pictures)
    elif isinstance(text, str) and MARK in text:
        yield from _parts(text, pictures)
    else:
        yield part


def _parts(text: str, pictures: Iterator[str]) -> Iterator[Mapping[str, Any]]:
    for piece in re.split(f"({MARK})", text):
        if piece == MARK:
            yield from _next(pictures)
        elif piece:
            yield {"type": "text", "text": piece}


def _next(pictures: Iterator[str]) -> Iterator[Mapping[str, Any]]:
    """Yields nothing if there are too few: they are counted afterwards."""
    where = next(pictures, None)
    if where is not None:
        yield {"type": "image", "image": where}


def _is_place(part: Any) -> bool:
    """A part of kind `image` that does not say which."""
    return part.get("type") == "image" and not any(part.get(name) for name in ("image", "url", "image_url"))


def _picture(picture: Any, field: str, folder: Path) -> str:
    """A ``data:`` URL or an absolute path."""
    if isinstance(picture, Mapping):
        picture = picture.get("path") if picture.get("bytes") is None else picture["bytes"]
        if picture is None:
            raise BadImages(f"{field} has neither bytes nor a path")
    if isinstance(picture, bytes | bytearray):
        return _url(bytes(picture), field)
    if not isinstance(picture, str):
        raise BadImages(f"{field} must be {{'bytes', 'path'}}, bytes or a path, found {type(picture).__name__}")
    if picture.startswith("data:"):
        return picture
    whole = (folder / picture.removeprefix("file://")).resolve()
    if not whole.is_file():
        raise BadImages(f"{field}: {whole} is not a file")
    return str(whole)


def _url(data: bytes, field: str) -> str:
    try:
        from PIL import Image
    except ImportError as error:
        fix = "Pillow is not installed: pip install 'penstock[vision]'"
        raise BadImages(f"{field} has bytes of a picture, and {fix}") from error
    try:
        with Image.open(io.BytesIO(data)) as opened:
            kind = opened.format
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise BadImages(f"{field}: its {len(data)} bytes are no picture: {error}") from error
    if kind not in MIME:
        raise BadImages(f"{field} is of kind {kind}; {', '.join(MIME)} are read")
    return f"data:image/{MIME[kind]};base64,{base64.b64encode(data).decode()}"
