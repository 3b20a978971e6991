"""An evaluation is of one version: its server loads no other while one runs."""

from __future__ import annotations

from collections.abc import Callable

from penstock.rollout_server.server.registration import QueueConnection
from penstock.rollout_server.server.request_queue import TooOld
from penstock.transfer_queue import QueueError, under_evaluation


class VersionPin:
    """Pins an evaluation server to one version while an evaluation runs: all its tokens come from one policy.

        newer weights ──► refuse requests ──► no request in flight, and no evaluation that needs this version?
                                                 yes: load them     no: keep the weights, admit requests again

    Requests are refused before the queue is asked, so that an evaluation that begins meanwhile waits for the new
    weights. `may_move` before weights change, `moved` after that attempt; `check` before each request.
    """

    def __init__(self, connection: QueueConnection, version: Callable[[], int]) -> None:
        self._connection = connection
        self._version = version
        self._moving = False

    async def may_move(self, in_flight: Callable[[], int]) -> bool:
        """Returns True if the weights may change now; False if the queue does not answer."""
        self._moving = True
        try:
            self._moving = in_flight() == 0 and not under_evaluation(
                await self._connection.ask(self._connection.queue.status()), self._version()
            )
        except QueueError:
            self._moving = False
        return self._moving

    def moved(self) -> None:
        """The weights were loaded, or were not."""
        self._moving = False

    def check(self) -> None:
        """Raises `TooOld` between two versions; the request is admitted a moment later."""
        if self._moving:
            raise TooOld("newer weights are being loaded, and new evaluations wait for them")
