"""What went with boxes that a session had to end, until a result has said so."""

from __future__ import annotations

from dataclasses import replace

from penstock.sandbox.protocol import RunResult

STATEFUL = frozenset({"python", "shell"})


class Losses:
    """One session's account. The driver tells what is lost inside a living box; this, what went with a box."""

    def __init__(self) -> None:
        self._in_use: set[str] = set()
        """Kinds of calls that may have left state in the box that lives now."""
        self._untold: set[str] = set()
        self._files = False

    def began(self, kind: str) -> None:
        self._in_use |= STATEFUL & {kind}

    def box_ended(self) -> None:
        self._untold |= self._in_use
        self._in_use.clear()
        self._files = True

    def told(self, kind: str, result: RunResult) -> RunResult:
        """`result` of a call of `kind`, with what it has to tell besides."""
        lost = result.state_lost or self._files or kind in self._untold
        told = replace(result, state_lost=lost, files_lost=self._files)
        self._untold.discard(kind)
        self._files = False
        return told
