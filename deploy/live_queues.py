"""The queues of the living runs in a folder: found by their ``connect.env``, connected when somebody looks."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.deploy.config import ConfigError
from penstock.deploy.connection import RunConnection
from penstock.transfer_queue import TransferQueue, TransferQueueConfig

SETTINGS = TransferQueueConfig(deadline_s=4.0)
"""A person looks: say soon that a queue is away."""


@dataclass(slots=True)
class _Open:
    link: RunConnection
    queue: TransferQueue


class FolderQueues:
    """`own` is the run of this process's environment, wherever its folder is; the others are in `runs_dir`.

    A run that ended takes its ``connect.env`` away; one that was resumed has another, and is connected anew.
    """

    def __init__(self, runs_dir: Path, own: RunConnection | None) -> None:
        self._runs_dir = runs_dir
        self._own = own
        self._open: dict[str, _Open] = {}
        self._one_at_a_time: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def names(self) -> Sequence[str]:
        found = [path.parent.name for path in self._runs_dir.glob("*/connect.env")]
        return sorted({*found, *([self._own.run] if self._own is not None else [])})

    async def queue(self, run: str) -> TransferQueue | None:
        """See `LiveQueues`."""
        link = await asyncio.to_thread(self._link, run)
        async with self._one_at_a_time[run]:  # an unreachable queue delays no request for another run
            opened = self._open.get(run)
            if opened is not None and opened.link != link:
                del self._open[run]
                await opened.queue.close()
            if link is None:
                return None
            if run not in self._open:
                self._open[run] = _Open(link, await link.connect(SETTINGS))
            return self._open[run].queue

    async def close(self) -> None:
        while self._open:
            _, opened = self._open.popitem()
            await opened.queue.close()

    def _link(self, run: str) -> RunConnection | None:
        if self._own is not None and run == self._own.run:
            return self._own
        try:
            return RunConnection.from_lines((self._runs_dir / run / "connect.env").read_text(encoding="utf-8"))
        except (OSError, ConfigError):  # it ended, is another person's, or is being written
            return None
