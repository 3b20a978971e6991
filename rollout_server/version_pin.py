"""A server for evaluations stands still while one is on: all its tokens are of one policy version.

    newer weights ──► nobody is let in ──► nothing in flight, no evaluation that this version may sample?
                                              yes: load them     no: stay, and let in again

Nobody is let in before the queue is asked, so an evaluation that begins meanwhile waits for the new weights.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.rollout_server.registration import QueueLine
from penstock.rollout_server.request_queue import TooOld
from penstock.transfer_queue import QueueError, under_evaluation


class Standing:
    """`may_move` before weights change, `moved` when they have, or have not; `check` before each request."""

    def __init__(self, line: QueueLine, version: Callable[[], int]) -> None:
        self._line = line
        self._version = version
        self._moving = False

    async def may_move(self, in_flight: Callable[[], int]) -> bool:
        """False also where the queue does not answer."""
        self._moving = True
        self._moving = in_flight() == 0 and not await self._busy()
        return self._moving

    def moved(self) -> None:
        self._moving = False

    def check(self) -> None:
        """Raises `TooOld` between two versions; the request is welcome a moment later."""
        if self._moving:
            raise TooOld("newer weights are being loaded: what begins now is sampled by them alone")

    async def _busy(self) -> bool:
        try:
            return under_evaluation(await self._line.ask(self._line.queue.status()), self._version())
        except QueueError:
            return True
