"""Content of a message, as text or in parts, whichever route it came by."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from penstock.gateway.wire.check import Wire
from penstock.gateway.wire.types import BadAsk


class ContentPart(Wire):
    """A part as a route spells it."""

    @property
    @abstractmethod
    def plain(self) -> dict[str, str]:
        """As a chat template takes it: `text_part` or `image_part`."""


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def image_part(url: str) -> dict[str, str]:
    return {"type": "image", "url": url}


def plain_content(content: str | Sequence[ContentPart] | None, where: str, images: bool) -> Any:
    """Text parts are joined with nothing between them; with images the parts stay apart.

    Raises `BadAsk` at `where` for an image where the model takes none.
    """
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part.plain for part in content]
    seen = [i for i, part in enumerate(parts) if part["type"] == "image"]
    if seen and not images:
        raise BadAsk(f"{where}.{seen[0]}", "this model takes no images", "unsupported_parameter")
    return parts if seen else "".join(part["text"] for part in parts)
