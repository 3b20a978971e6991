"""The number of episodes that one worker runs: additive increase, multiplicative decrease on the rollout servers' load.

every ADAPT_S:  a server refused (429), or all of them are over their load ─► limit × DECREASE, at most every HOLD_S
                else, where the worker is at its limit                     ─► limit + a 32nd of the most

Running episodes are never stopped: the limit holds back new ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from penstock.transfer_queue import ServerInfo

ADAPT_S = 1.0
HOLD_S = 5.0
"""Pause after a decrease: running episodes need time to end, else one long queue would count five times."""
DECREASE = 0.75
STEPS = 32


@runtime_checkable
class WatchedClient(Protocol):
    """A rollout client that reports the load of its servers; for others the limit is constant."""

    refused: int
    """Refusals (429) by servers since the start."""

    async def servers(self) -> Sequence[ServerInfo]:
        """Newest heartbeats. Raises `QueueError`."""


class Concurrency:
    """`limit` is between 1 and `most`. Pure: time and load are arguments."""

    def __init__(self, most: int, server_requests: int, restarts: int = 0) -> None:
        """Begins with `most`, after each restart with a quarter of it: an episode that ends its workers is soon alone,
        and only its own lost leases are still counted.

        `server_requests`: requests in flight above which a server counts as loaded; 0: load is ignored.
        """
        self.limit = max(1, most >> 2 * restarts)
        self._most = most
        self._server_requests = server_requests
        self._refused = 0
        self._held_until_s = 0.0

    def saw(self, servers: Sequence[ServerInfo], refused: int, running: int, now_s: float) -> int:
        """The new limit. `refused`: refusals since the start; `running`: this worker's episodes."""
        # One free server is enough: requests are routed to it.
        loads = [server.in_flight for server in servers if server.accepting and not server.evaluates]
        all_loaded = bool(loads) and 0 < self._server_requests < min(loads)
        pressed = refused > self._refused or all_loaded
        self._refused = refused
        if pressed and now_s >= self._held_until_s:
            # From what runs, not from the limit: a limit that is not reached would have to fall for long to be felt.
            self.limit = max(1, int(min(self.limit, max(running, 1)) * DECREASE))
            self._held_until_s = now_s + HOLD_S
        elif not pressed and running >= self.limit:
            self.limit = min(self._most, self.limit + max(1, self._most // STEPS))
        return self.limit
