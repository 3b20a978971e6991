"""Decides which server fetches a published file from which, so that about one copy leaves the trainer. No I/O.

    s0 asks ── trainer          the first copy
    s1 asks ── wait             no server has it yet
    s0 has it
    s1, s2 ask ── s0            `FAN_OUT` at once from each holder
    s3 asks ── wait … s1 has it ── s1

A turn that its server does not end (killed, stopped) expires.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Set
from dataclasses import dataclass, field

SERVES = "Penstock-Serves"
"""Request header: the URL under which the asking server hands on what it has."""
AVOID = "Penstock-Avoid"
"""Request header: peers that failed the asking server, separated by commas."""
TRAINER = ""
FAN_OUT = 2
TURN_S = 10.0
FILES = 64
"""Remembered at most; older ones are deleted by then."""


@dataclass
class _File:
    holders: list[str] = field(default_factory=list)
    turns: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Server → (its source, the end of its turn)."""


class TransferScheduler:
    """The trainer has one. Servers are named by the URL that they serve under."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._files: dict[str, _File] = {}

    def ask(self, name: str, size: int, server: str, avoid: Set[str] = frozenset()) -> str | None:
        """Return the place where `server` fetches the file of `size` bytes: a peer's URL, or `TRAINER`. None: ask again
        soon.

        Peers to `avoid` are no holders any more: they are gone, or do not have what they should.
        """
        file = self._file(name)
        now = self._clock()
        file.holders = [holder for holder in file.holders if holder not in avoid]
        file.turns = {who: turn for who, turn in file.turns.items() if who != server and turn[1] > now}
        # The least busy one that may take another; the trainer only while no peer has the file.
        busy = [source for source, _ in file.turns.values()]
        peers = [holder for holder in file.holders if holder != server]
        room = FAN_OUT if peers else 1
        least = min(peers or [TRAINER], key=busy.count)
        source = least if busy.count(least) < room else None
        if source is not None:
            # A turn lasts `TURN_S` and what the file takes at this rate, at most.
            file.turns[server] = (source, now + TURN_S + size / 20e6)
        return source

    def has(self, name: str, server: str) -> None:
        """`server` has the whole file, verified."""
        file = self._file(name)
        file.turns.pop(server, None)
        if server not in file.holders:
            file.holders.append(server)

    def gave_up(self, name: str, server: str) -> None:
        """The connection broke off."""
        self._file(name).turns.pop(server, None)

    def _file(self, name: str) -> _File:
        file = self._files.setdefault(name, _File())
        while len(self._files) > FILES:
            del self._files[next(iter(self._files))]
        return file
