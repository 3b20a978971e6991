"""Converts our types to what JSON can hold."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any


def plain(value: Any) -> Any:
    """Numbers that JSON lacks become None, arrays lists, dataclasses mappings; any other type its text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return _made_plain(value)


def _made_plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    return plain(value.tolist()) if hasattr(value, "tolist") else str(value)
