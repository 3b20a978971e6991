"""Usage of a rollout server by episode: sampled tokens, and the time of its devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from penstock.common import DeviceClock, life_of_process, visible_devices
from penstock.rollout_server.server.registration import QueueConnection
from penstock.transfer_queue import IDLE, SETUP, UsageMeter, UsageReport


class ServerUsage:
    """Counts for the queue's ledger.

    The time between two counts goes to the episodes that sampled tokens in it, by their number; without tokens to those
    whose requests run, in equal parts; else it was idle, or the engine was starting.
    """

    def __init__(
        self,
        name: str,
        connection: QueueConnection,
        is_serving: Callable[[], bool],
        is_asleep: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_asleep`: the devices are the trainer's, which counts their time."""
        self._meter, self._connection = UsageMeter(f"{name} {life_of_process()}", self._count), connection
        self._is_serving, self._is_asleep = is_serving, is_asleep
        self._clock = DeviceClock(len(visible_devices()))
        self._running, self._tokens = Counter[str](), Counter[str]()

    def begin(self, episode: str) -> None:
        """Call when a request of `episode` gets its slot in the engine; an empty name is allowed."""
        self._running[episode] += 1

    def sampled(self, episode: str, tokens: int) -> None:
        self._tokens[episode] += tokens

    def end(self, episode: str) -> None:
        self._running[episode] -= 1

    async def keep(self) -> None:
        """Reports until cancelled."""
        await self._meter.keep(self._send)

    async def report(self) -> None:
        """Reports now; what the queue does not take is kept for the next report."""
        await self._meter.report(self._send)

    async def _send(self, usage: UsageReport) -> None:
        await self._connection.ask(self._connection.queue.report_usage(usage))

    def _count(self) -> None:
        elapsed_s = self._clock.elapsed_s()
        seconds = 0.0 if self._is_asleep() else elapsed_s
        self._running += Counter()  # drops those that have ended
        shares = +self._tokens or self._running or Counter({IDLE if self._is_serving() else SETUP: 1})
        for episode, share in shares.items():
            self._meter.add(episode, "rollout_s", seconds * share / shares.total())
        for episode, tokens in self._tokens.items():
            self._meter.add(episode, "tokens", tokens)
        self._tokens.clear()
