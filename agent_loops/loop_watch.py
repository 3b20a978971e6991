"""Finds code that blocks the event loop, and with it every episode of the worker.

beat (in the loop)    writes the time every BEAT_S
watch (a thread)      the beat is late ──► the loop's task and stack, look by look ──► innermost frame of user code

A late beat alone names no line: on a loaded machine, or while threads compute, many short steps make it late.
Only what every look meets for LIMIT_S is reported.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import sysconfig
import threading
import time
import traceback
from collections import deque
from itertools import takewhile
from types import CodeType, FrameType

BEAT_S = 0.05
LIMIT_S = 0.25
"""A longer step is reported."""
PLACES_MAX = 8
"""Places in user code that a worker tells the run of: a long computation is caught at another line each time."""
BLOCKING = "blocking code at "
"""Begins the cause of a wait that a worker reports for user code; the place follows."""
LOOP = (asyncio.BaseEventLoop.run_forever.__code__, asyncio.Runner.run.__code__)
"""Frames below them started the loop; they are on the stack of every call."""
LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
log = logging.getLogger(__name__)


class LoopWatch:
    """`start` in the loop that is watched; `stop` ends its thread."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self.blocked: dict[str, int] = {}
        """``file:line in function`` → how often the loop was blocked there. Each is logged once."""
        self._new_blocks = deque[tuple[str, float]]()
        """Places in user code that are not taken yet, each with the seconds of its first block so far."""
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

    def take_new_blocks(self) -> dict[str, float]:
        """Return the places in user code that have blocked the loop for the first time, with the seconds; at most the
        first `PLACES_MAX` in all."""
        return dict(self._new_blocks.popleft() for _ in range(len(self._new_blocks)))

    def _beat(self) -> None:
        now = time.monotonic()
        if self._beat_at:
            self._longest_s = max(self._longest_s, now - self._beat_at - BEAT_S)
        self._beat_at = now
        self._handle = self._loop.call_later(BEAT_S, self._beat)

    def _watch(self) -> None:
        """Reports a step of a task, and user code in it, once every look of `limit_s` has met it: once each."""
        step: tuple[object, ...] = ()
        since, reported = 0.0, False
        while not self._stopped.wait(self._limit_s / 4):
            beat, now = self._beat_at, time.monotonic()
            if now - beat <= 2 * BEAT_S:
                continue
            look = current_call(self._watched)
            if look is None:
                return  # the loop's thread has ended
            # Until the next beat each task takes one step, so a task identifies its step.
            called, place = look
            if step != (current := (beat, id(asyncio.current_task(self._loop)), called)):
                step, since, reported = current, now, False
            elif now - since > self._limit_s and not reported:
                reported = True
                if called is not None and place not in self.blocked and len(self.blocked) < PLACES_MAX:
                    self._new_blocks.append((place, now - since))
                self._report(place, now - since, is_users=called is not None)

    def _report(self, place: str, seconds: float, *, is_users: bool) -> None:
        if place not in self.blocked:
            blocked = f"the event loop, and with it every episode of this worker, has been blocked for {seconds:.2f} s"
            if is_users:
                log.warning("%s: %s; await the call, or run it with asyncio.to_thread", blocked, place)
            else:
                log.info("%s at %s, in no code of yours: this machine is busy", blocked, place)
        self.blocked[place] = self.blocked.get(place, 0) + 1


def current_call(thread: int) -> tuple[CodeType | None, str] | None:
    """The outermost user code that an event loop's thread runs, and its innermost line; without user code None and the
    innermost line of all. None for a thread that has ended.

    No frame outlives the look: it would hold the call's variables, and with them memory, locks and exported buffers.
    """
    innermost = sys._current_frames().get(thread)
    if innermost is None:
        return None
    calls = takewhile(lambda frame: frame.f_code not in LOOP, (frame for frame, _ in traceback.walk_stack(innermost)))
    users = [frame for frame in calls if _is_users(frame)]
    shown = users[0] if users else innermost
    place = f"{shown.f_code.co_filename}:{shown.f_lineno} in {shown.f_code.co_name}"
    return (users[-1].f_code if users else None), place


def _is_users(frame: FrameType) -> bool:
    """Returns whether the frame is neither in Penstock nor in Python nor in an installed package."""
    module = str(frame.f_globals.get("__name__", ""))
    file = frame.f_code.co_filename
    return not (module.partition(".")[0] == "penstock" or file.startswith(("<frozen", *LIBRARIES)))
