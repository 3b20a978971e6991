"""What the parts of the in-memory queue share."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

from penstock.transfer_queue.batch_log import BatchLog
from penstock.transfer_queue.memory_state import Member, MemoryState, split_episode
from penstock.transfer_queue.queue import (
    KEPT_UPDATES,
    BadPayload,
    Limits,
    NoSuchRun,
    QueueError,
    ServerInfo,
    WeightUpdate,
)
from penstock.transfer_queue.rows import check_limits


class MemoryRun:
    """One run and how its members are found. `clock` (seconds) is the queue's own time."""

    def __init__(
        self,
        *,
        registry_ttl_s: float = 6.0,
        clock: Callable[[], float] = time.monotonic,
        batch_log: BatchLog | None = None,
    ) -> None:
        self._clock = clock
        self._batch_log = batch_log
        self._registry_ttl_s = registry_ttl_s
        self._forget_everything()

    def _forget_everything(self) -> None:
        self._state = MemoryState(self._clock)
        self._config: str | None = None
        self._servers: dict[str, tuple[ServerInfo, float]] = {}
        self._updates: deque[WeightUpdate] = deque(maxlen=KEPT_UPDATES)
        self._waits: Counter[str] = Counter()

    async def create_run(self, limits: Limits, config: str) -> None:
        check_limits(limits)
        if self._config is not None and self._state.limits != limits:
            raise QueueError(f"the run exists with other limits: {self._state.limits}, not {limits}")
        self._state.limits = limits
        self._config = config

    async def config(self) -> str:
        if self._config is None:
            raise NoSuchRun("no such run: create_run comes first")
        return self._config

    async def drop_run(self) -> int:
        keys = len(self._state.groups) + (self._config is not None)
        self._forget_everything()
        return keys

    async def close(self) -> None:
        return None

    def _member(self, episode_id: str) -> Member | None:
        task_id, index = split_episode(episode_id)
        group = self._state.groups.get(task_id)
        return group.members[index] if group and index < len(group.members) else None

    def _payload(self, episode_id: str) -> bytes:
        member = self._member(episode_id)
        if member is not None and member.spilled and self._batch_log is not None:
            return self._batch_log.read(None, [episode_id])[episode_id]
        if member is None or member.payload is None:
            raise BadPayload(f"{episode_id}: no payload; not completed, or its step is committed")
        return member.payload
