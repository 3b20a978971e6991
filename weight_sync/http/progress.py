"""When a fetch is given up: by its progress and its size, never by a fixed time for files of every size.

    bytes come     `STALL_BYTES` in each `stall_s`, or what is missing: it may last as long as the file is large
    none come      given up after `stall_s`
    turn awaited   behind other servers, for `stall_s` and what the file takes at `TURNS_BYTES_PER_S`, in all

What came before a fetch is given up stays: the next pull continues it, or fetches what is newest by then.
"""

from __future__ import annotations

import time
from collections.abc import Callable

STALL_S = 30.0
STALL_BYTES = 1 << 20
TURNS_BYTES_PER_S = 1e6
"""Copies double in each round of turns, and a turn lasts what the file takes at twenty times this rate at most."""


class FetchProgress:
    """Progress of one file of `size` bytes, of which `have` are here."""

    def __init__(self, size: int, have: int, stall_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._size, self._stall_s, self._clock = size, stall_s, clock
        self._turns_s = stall_s + size / TURNS_BYTES_PER_S
        """Left for waiting."""
        self._mark, self._since = have, clock()

    def note(self, have: int) -> None:
        """`have` bytes of the file are here."""
        if have >= min(self._size, self._mark + STALL_BYTES) or have < self._mark:
            self._mark, self._since = have, self._clock()

    def restart(self) -> None:
        """Another source is asked next: it has the whole stall time."""
        self._since = self._clock()

    def waited(self) -> None:
        """The trainer lets another server fetch first, so nothing came since the last call: no fault of the source."""
        self._turns_s -= self._clock() - self._since
        self.restart()

    def problem(self, pause_s: float = 0.0) -> str:
        """Why the fetch is to be given up, were it to pause for `pause_s` now; empty if it may continue."""
        if self._turns_s < 0:
            return "not done in time: it waited for its turn behind other servers for too long"
        if self._clock() + pause_s - self._since > self._stall_s:
            least = min(STALL_BYTES, self._size - self._mark)
            return f"not done in time: less than {least} bytes came in {self._stall_s:g} s"
        return ""
