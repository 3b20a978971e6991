"""A fixed number of slots, first come, first served, each wait with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from penstock.sandbox.protocol import SandboxBusy

ASK_AGAIN_S = 2.0


class Slots:
    """`free` ones lie here; whoever takes one gives it back."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.free = count
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def take_now(self) -> bool:
        """Without a wait, and never past those who wait."""
        if self.free == 0 or self._waiting:
            return False
        self.free -= 1
        return True

    async def take(self, timeout_s: float) -> None:
        """Raises `SandboxBusy` past `timeout_s`, with how long was waited."""
        if self.take_now():
            return
        started = time.monotonic()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(timeout_s):
                await turn
        except BaseException as error:
            self._leave(turn)
            if isinstance(error, TimeoutError):
                waited = f"all {self.count} boxes were in use; waited {time.monotonic() - started:.1f} s in the queue"
                raise SandboxBusy(f"{waited} (sandbox.max_boxes)", ASK_AGAIN_S) from error
            raise

    def _leave(self, turn: asyncio.Future[None]) -> None:
        """A turn that came at the very moment its waiter gave up goes to the next one."""
        if turn in self._waiting:
            self._waiting.remove(turn)
        elif turn.done() and not turn.cancelled():
            self.give()

    def give(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.free += 1
