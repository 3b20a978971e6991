"""What `undo` goes back to, kept in the box itself: it is there too where another worker takes over the episode."""

from __future__ import annotations

import json
from typing import Any

import xxhash

from penstock.sandbox import Session

MAX_STEPS = 20
MAX_BYTES = 4 << 20
"""Of one file's history; the oldest steps go first."""


class History:
    """The earlier texts of one file, newest last. `before` None: the edit made the file."""

    def __init__(self, session: Session, path: str) -> None:
        self._session = session
        self._file = f".penstock_editor_{xxhash.xxh3_64_hexdigest(path.encode())}"

    async def push(self, before: str | None, after: str) -> None:
        steps = [*await self._steps(), {"before": before, "after": _hash(after)}][-MAX_STEPS:]
        await self._write(steps)

    async def pop(self) -> tuple[str | None, str] | None:
        """(text before the last edit, hash of the text after it), or None where there is no edit left."""
        steps = await self._steps()
        if not steps:
            return None
        last = steps.pop()
        await self._write(steps)
        return last["before"], last["after"]

    async def _steps(self) -> list[dict[str, Any]]:
        """Code in the box may have damaged the file: then there is nothing to go back to."""
        try:
            steps = json.loads(await self._session.read_file(self._file, MAX_BYTES + 1))
            return [{"before": step["before"], "after": step["after"]} for step in steps]
        except (OSError, ValueError, TypeError, KeyError):
            return []

    async def _write(self, steps: list[dict[str, Any]]) -> None:
        data = json.dumps(steps).encode()
        while len(data) > MAX_BYTES and steps:
            steps = steps[1:]
            data = json.dumps(steps).encode()
        await self._session.write_file(self._file, data)


def _hash(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode("utf-8", "surrogatepass"))


def is_unchanged(text: str | None, after: str) -> bool:
    """Whether the file still is as the edit left it."""
    return text is not None and _hash(text) == after
