"""The run itself in the queue in memory: its identity, its head, its servers and what they report."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace

from penstock.testing.memory_state import MemoryState
from penstock.transfer_queue.admission import check_limits
from penstock.transfer_queue.errors import NoSuchRun, QueueError, RunTaken
from penstock.transfer_queue.ledger import LedgerEntry, UsageReport
from penstock.transfer_queue.turns import TurnCall, TurnReport, Turns, TurnTable
from penstock.transfer_queue.types import KEPT_UPDATES, Head, Limits, RunIdentity, RunRecord, ServerInfo, WeightUpdate


class MemoryRun:
    """These calls of `TransferQueue`; `_state` has the run's limits, tasks and steps."""

    def __init__(self, registry_ttl_s: float, clock: Callable[[], float]) -> None:
        """`clock` in seconds."""
        self._clock = clock
        self._registry_ttl_s = registry_ttl_s
        self._forget_everything()

    def _forget_everything(self) -> None:
        self._state = MemoryState(self._clock)
        self._config: str | None = None
        self._identity = RunIdentity("", "", "")
        self._created: float
        """Time at which `create_run` made the run."""
        self._head: tuple[str, float] = ("", 0.0)
        self._servers: dict[str, tuple[ServerInfo, float]] = {}
        self._updates: deque[WeightUpdate] = deque(maxlen=KEPT_UPDATES)
        self._waits: Counter[str] = Counter()
        self._proven: set[str] = set()
        self._reports: set[str] = set()
        self._turns = TurnTable(self._clock)

    async def create_run(self, limits: Limits, config: str, identity: RunIdentity | None = None) -> RunRecord | None:
        check_limits(limits)
        record = None
        if self._config is not None:
            if self._is_another(config, identity):
                raise RunTaken("in memory", self._identity, identity or RunIdentity("", "", ""))
            if self._state.limits != limits:
                raise QueueError(f"the run exists with other limits: {self._state.limits}, not {limits}")
            record = RunRecord(self._identity, self._clock() - self._created)
        else:
            self._created = self._clock()
        self._state.limits, self._config, self._identity = limits, config, identity or self._identity
        return record

    def _is_another(self, config: str, identity: RunIdentity | None) -> bool:
        if identity is None or not self._identity.run_id:
            return self._config != config
        return (identity.run_id, identity.model) != (self._identity.run_id, self._identity.model)

    async def claim_head(self, holder: str, ttl_s: float, dead: str = "") -> Head | None:
        known, until = self._head
        if known not in ("", holder, dead) and until > self._clock():
            return Head(known, until - self._clock())
        self._head = holder, self._clock() + ttl_s
        return None

    async def release_head(self, holder: str) -> None:
        if self._head[0] == holder:
            self._head = ("", 0.0)

    async def config(self) -> str:
        if self._config is None:
            raise NoSuchRun("no such run: create_run comes first")
        return self._config

    async def heartbeat(self, server: ServerInfo) -> None:
        self._servers[server.server_id] = (server, self._clock() + self._registry_ttl_s)

    async def deregister(self, server_id: str) -> None:
        self._servers.pop(server_id, None)

    async def servers(self) -> list[ServerInfo]:
        now = self._clock()
        live = [
            replace(info, age_s=self._registry_ttl_s - (expires_at - now))
            for info, expires_at in self._servers.values()
            if expires_at > now
        ]
        return sorted(live, key=lambda info: info.server_id)

    async def report_update(self, update: WeightUpdate) -> None:
        self._updates.append(update)

    async def updates(self) -> list[WeightUpdate]:
        return list(self._updates)

    async def report_usage(self, usage: UsageReport) -> None:
        if usage.report_id not in self._reports:
            self._reports.add(usage.report_id)
            self._state.book(LedgerEntry(0, usage))

    async def ledger(self, after: int, limit: int = 1000) -> list[LedgerEntry]:
        return [entry for entry in self._state.ledger if entry.number > after][:limit]

    async def trim_ledger(self, upto: int) -> None:
        self._state.ledger = [entry for entry in self._state.ledger if entry.number > upto]

    async def add_wait(self, role: str, cause: str, seconds: float) -> None:
        self._waits[f"{role}:{cause}"] += seconds  # type: ignore[assignment]

    async def prove_reward(self, reward: str) -> None:
        await self.config()
        self._proven.add(reward)

    async def is_reward_proven(self, reward: str) -> bool:
        return reward in self._proven

    async def take_turn(self, call: TurnCall) -> Turns:
        await self.config()
        return self._turns.take(call)

    async def turns(self) -> Turns:
        return self._turns.look()

    async def turn_reports(self) -> list[TurnReport]:
        return list(self._turns.reports)
