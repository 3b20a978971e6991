"""Results of pure tools by their arguments: the least recently used go first."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from penstock.tools.base import ToolResult


class ResultCache:
    """Shared by all episodes of a worker; errors are not kept, so a mended service answers again."""

    def __init__(self, max_entries: int, max_chars: int = 32 << 20) -> None:
        self._max_entries = max_entries
        self._max_chars = max_chars
        self._entries: OrderedDict[str, ToolResult] = OrderedDict()
        self._chars = 0
        self.hits = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, arguments: Mapping[str, Any]) -> ToolResult | None:
        key = _key(arguments)
        result = self._entries.get(key)
        if result is not None:
            self._entries.move_to_end(key)
            self.hits += 1
        return result

    def put(self, arguments: Mapping[str, Any], result: ToolResult) -> None:
        if result.is_error:
            return
        key = _key(arguments)
        self._drop(key)
        self._entries[key] = result
        self._chars += len(key) + len(result.text)
        while self._entries and (len(self._entries) > self._max_entries or self._chars > self._max_chars):
            self._drop(next(iter(self._entries)))

    def _drop(self, key: str) -> None:
        result = self._entries.pop(key, None)
        if result is not None:
            self._chars -= len(key) + len(result.text)


def _key(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, sort_keys=True, ensure_ascii=False)
