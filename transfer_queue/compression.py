"""zstd of stored fields, through the package `zstandard` where it is installed."""

from __future__ import annotations

from typing import Any

from penstock.transfer_queue.queue import BadPayload, QueueError

COMPRESSIONS = ("none", "zstd")
LEVEL = 1
"""Higher ones cost several times the time for a few percent of token ids; logprobs hardly shrink at any."""
_MIN_BYTES = 512
_MOST_KEPT = 0.9


def check_compression(name: str) -> None:
    """Raise `QueueError` for an unknown name, and for one whose package is missing."""
    if name not in COMPRESSIONS:
        raise QueueError(f"compression: {name!r} is unknown; one of {', '.join(COMPRESSIONS)}")
    if name == "zstd":
        _zstandard()


def compress(raw: Any, size: int) -> bytes | None:
    """One zstd frame of the buffer `raw` of `size` bytes; None where that is not really smaller."""
    if size < _MIN_BYTES:
        return None
    packed: bytes = _zstandard().ZstdCompressor(level=LEVEL).compress(raw)
    return packed if len(packed) < _MOST_KEPT * size else None


def decompress(packed: Any, size: int, field: str) -> bytes:
    """The `size` bytes of one frame. Raises `BadPayload` naming `field`, `QueueError` without the package.

    The frame must declare exactly `size`: zstandard allocates what a frame declares, so a small payload could
    otherwise take all memory.
    """
    zstandard = _zstandard()
    try:
        declared = zstandard.frame_content_size(packed)
        if declared != size:
            raise BadPayload(f"{field}: its zstd frame declares {declared} bytes, not {size}")
        raw: bytes = zstandard.ZstdDecompressor().decompress(packed, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BadPayload(f"{field}: not one whole zstd frame: {error}") from error
    if len(raw) != size:
        raise BadPayload(f"{field}: its zstd frame holds {len(raw)} bytes, not {size}")
    return raw


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise QueueError("zstd payloads need the package zstandard: pip install 'penstock[zstd]'") from error
    return zstandard
