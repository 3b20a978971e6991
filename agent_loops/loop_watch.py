"""Finds code that blocks the event loop, and with it every episode of the worker.

beat (in the loop)    writes the time every BEAT_S
watch (a thread)      the last beat is old ──► the loop's current stack ──► innermost frame of user code

On a loaded machine the loop may be late before user code begins to block it: the watch looks until it sees user code.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import sysconfig
import threading
import time
import traceback
from types import FrameType

BEAT_S = 0.05
LIMIT_S = 0.25
"""A longer delay is reported."""
LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
log = logging.getLogger(__name__)


class LoopWatch:
    """`start` in the loop that is watched; `stop` ends its thread."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self.blocked: dict[str, int] = {}
        """``file:line in function`` → how often the loop was blocked there. Each is logged once."""
        self._limit_s = limit_s
        self._longest_s = 0.0
        self._beat_at = 0.0
        self._stopped = threading.Event()
        self._handle: asyncio.TimerHandle | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._loop, self._watched = asyncio.get_running_loop(), threading.get_ident()
        self._beat()
        self._thread = threading.Thread(target=self._watch, name="event loop watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._handle is not None:
            self._handle.cancel()
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def take_longest_s(self) -> float:
        """Longest delay of a beat since the last call."""
        longest, self._longest_s = self._longest_s, 0.0
        return longest

    def _beat(self) -> None:
        now = time.monotonic()
        if self._beat_at:
            self._longest_s = max(self._longest_s, now - self._beat_at - BEAT_S)
        self._beat_at = now
        self._handle = self._loop.call_later(BEAT_S, self._beat)

    def _watch(self) -> None:
        """Reports a blocked loop once by the user's line, and once without if another line is seen first."""
        named = other = 0.0  # the beats after which the loop was reported as blocked
        while not self._stopped.wait(self._limit_s / 4):
            beat = self._beat_at
            lag_s = time.monotonic() - beat - BEAT_S
            if lag_s <= self._limit_s or beat == named:
                continue
            innermost = sys._current_frames().get(self._watched)
            if innermost is None:
                return  # the loop's thread has ended
            users = next((frame for frame, _ in traceback.walk_stack(innermost) if _is_users(frame)), None)
            if users is not None:
                named = beat
                self._report(users, lag_s)
            elif beat != other:
                other = beat
                self._report(innermost, lag_s)

    def _report(self, frame: FrameType, lag_s: float) -> None:
        place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        if place not in self.blocked:
            log.warning(
                "the event loop, and with it every episode of this worker, has been blocked for %.2f s: %s; "
                "await the call, or run it with asyncio.to_thread",
                lag_s,
                place,
            )
        self.blocked[place] = self.blocked.get(place, 0) + 1


def _is_users(frame: FrameType) -> bool:
    """Returns whether the frame is neither in Penstock nor in Python nor in an installed package."""
    module = str(frame.f_globals.get("__name__", ""))
    file = frame.f_code.co_filename
    return not (module.partition(".")[0] == "penstock" or file.startswith(("<frozen", *LIBRARIES)))
