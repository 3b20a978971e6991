"""The episodes that a worker runs now: a task per lease, renewed while it runs, handed back at a drain."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from penstock.agent_loops.episode import Episode
from penstock.agent_loops.parts import EpisodeParts
from penstock.agent_loops.stats import WorkerStats
from penstock.transfer_queue import Lease, LeaseLost, Outcome, OutcomeKind, QueueError

DRAIN_DEADLINE_S = 10.0
CHUNK = 256
"""Leases of one call: neither the queue nor this worker's loop stands still for thousands at once."""
log = logging.getLogger(__name__)


class RunningEpisodes:
    """`ended` is called after each end, whatever it was."""

    def __init__(self, parts: EpisodeParts, stats: WorkerStats, ended: Callable[[], None]) -> None:
        self.running: dict[str, tuple[Lease, asyncio.Task[None]]] = {}
        self._parts = parts
        self._stats = stats
        self._ended = ended

    def __len__(self) -> int:
        return len(self.running)

    def start(self, lease: Lease) -> None:
        """Run it. A run of the same episode under an older lease is stopped: whatever it brought would be refused."""
        if lease.episode_id in self.running:
            self._cancel_lost(self.running[lease.episode_id][0])
        task = asyncio.create_task(self._run(lease), name=lease.episode_id)
        self.running[lease.episode_id] = (lease, task)
        task.add_done_callback(lambda _: self._forget(lease))

    async def renew(self) -> None:
        """One round over all leases; runs whose lease was lost are stopped. Raises `QueueError`."""
        held = {episode_id: lease for episode_id, (lease, _) in self.running.items()}
        for leases in _chunks(list(held.values())):
            for episode_id in await self._parts.queue.renew(leases):
                self._cancel_lost(held[episode_id])

    async def drain(self) -> None:
        """Every episode gives its tools back first, then its lease goes back with its journal."""
        running = list(self.running.values())
        if not running:
            return
        for _, task in running:
            _cancel_once(task)
        deadline = time.monotonic() + DRAIN_DEADLINE_S
        await asyncio.wait([task for _, task in running], timeout=DRAIN_DEADLINE_S)
        ended = [lease for lease, task in running if task.done() and task.cancelled()]
        for leases in _chunks(ended):
            if time.monotonic() > deadline:
                log.warning("no time was left to hand every lease back; the others run out by themselves")
                break
            await asyncio.gather(*(self._hand_back(lease) for lease in leases))
        log.info("drained: %d of %d episodes stopped", len(ended), len(running))

    # one episode ---------------------------------------------------------------------------------------------------
    async def _run(self, lease: Lease) -> None:
        started = time.monotonic()
        try:
            outcome = await Episode(self._parts, lease).run()
        except LeaseLost:
            log.warning("episode %s went to another worker", lease.episode_id)
            return
        except QueueError as error:
            outcome = Outcome(OutcomeKind.INFRA_ERROR, str(error), "queue")
        except Exception as error:
            log.exception("episode %s failed in the worker itself", lease.episode_id)
            outcome = Outcome(OutcomeKind.INFRA_ERROR, repr(error), "worker")
        self._stats.add_episode(outcome, time.monotonic() - started)

    def _forget(self, lease: Lease) -> None:
        """A callback of the task, not its last line: a task cancelled before its first step runs no line at all."""
        held = self.running.get(lease.episode_id)
        if held is not None and held[0].fence == lease.fence:
            del self.running[lease.episode_id]
        self._ended()

    def _cancel_lost(self, lease: Lease) -> None:
        """Only the run that held the lost lease: the episode may have ended, or been leased anew, meanwhile."""
        current = self.running.get(lease.episode_id)
        if current is not None and current[0].fence == lease.fence:
            log.warning("lease of %s was lost; stopping it", lease.episode_id)
            _cancel_once(current[1])

    async def _hand_back(self, lease: Lease) -> None:
        """A lease that is lost by now is refused, and that is right."""
        try:
            async with asyncio.timeout(DRAIN_DEADLINE_S / 2):
                await self._parts.queue.release(lease)
        except (QueueError, TimeoutError) as error:
            log.warning("lease of %s was not handed back (%s); it runs out by itself", lease.episode_id, error)


def _cancel_once(task: asyncio.Task[None]) -> None:
    """A second cancellation would break off the teardown that the first one began."""
    if not task.cancelling():
        task.cancel()


def _chunks(leases: Sequence[Lease]) -> list[Sequence[Lease]]:
    return [leases[start : start + CHUNK] for start in range(0, len(leases), CHUNK)]
