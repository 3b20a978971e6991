"""Diagnoses a stalled run: names the component that should have made progress.

Input: the queue's status, the server registry and the local processes. The rules follow a task backwards from the
trainer; the first that matches names the component. Components before it in the pipeline wait for it, components after
it have no work.

    not running · stopped by a signal · queue unreachable · trainer has a batch · no server · servers too old ·
    requests in flight · episodes held without a request · no worker leases · nothing to lease
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.transfer_queue import ServerInfo, Status


@dataclass(frozen=True, slots=True)
class LocalRole:
    """A role's process on this machine, as its supervisor sees it."""

    name: str
    running: bool
    is_suspended: bool = False
    """True if SIGSTOP or a debugger holds the process."""
    restarts: int = 0
    cpu_s: float = 0.0
    """CPU time of its process tree since the last progress."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a stalled run."""

    status: Status | None
    """None: the queue did not answer."""
    servers: Sequence[ServerInfo]
    roles: Sequence[LocalRole]
    groups_per_step: int
    max_staleness: int
    steps: int


@dataclass(frozen=True, slots=True)
class StallCause:
    part: str
    """Names of roles, or ``queue``."""
    why: str

    def __str__(self) -> str:
        return f"{self.part}: {self.why}"


Rule = Callable[[Snapshot, Status], StallCause | None]


def diagnose_stall(snapshot: Snapshot) -> StallCause:
    if (cause := _local(snapshot)) is not None:
        return cause
    if snapshot.status is None:
        return StallCause("queue", "it does not answer: every other component waits for it")
    rules: Sequence[Rule] = (
        _trainer_has_a_batch,
        _no_server,
        _servers_too_old,
        _requests_in_flight,
        _episodes_without_a_request,
        _no_worker_leases,
        _nothing_to_lease,
    )
    for rule in rules:
        if (cause := rule(snapshot, snapshot.status)) is not None:
            return cause
    return StallCause("trainer", "every group is accounted for, no component has work, and no step is trained")


def _local(snapshot: Snapshot) -> StallCause | None:
    for role in snapshot.roles:
        if role.is_suspended:
            return StallCause(role.name, "its process is stopped (SIGSTOP or a debugger); `kill -CONT` continues it")
    away = [role for role in snapshot.roles if not role.running]
    if away:
        listed = ", ".join(f"{role.name} after {role.restarts} restarts" for role in away)
        return StallCause(", ".join(role.name for role in away), f"not running ({listed})")
    return None


def _trainer_has_a_batch(snapshot: Snapshot, status: Status) -> StallCause | None:
    groups = status.groups
    if status.version >= snapshot.steps:  # the last evaluation is what the trainer waits for
        return None
    if groups.get("shipped", 0):
        return StallCause(
            "trainer", f"it has leased step {status.step - 1} and published only version {status.version}"
        )
    if groups.get("ready", 0) >= snapshot.groups_per_step and not groups.get("admitted", 0):
        return StallCause(
            "trainer", f"{groups['ready']} groups are ready, {snapshot.groups_per_step} make a step: it leases none"
        )
    return None


def _no_server(snapshot: Snapshot, status: Status) -> StallCause | None:
    if not _has_work(status):
        return None
    if not snapshot.servers:
        names = _named(snapshot.roles, "rollout") or "rollout servers"
        return StallCause(names, "no server is in the registry: its engine has not started yet, or none was started")
    if all(server.asleep for server in snapshot.servers):
        return StallCause("trainer", "it has the devices' turn, engines are asleep, and it publishes no version")
    if not any(server.accepting for server in snapshot.servers):
        return StallCause(_ids(snapshot.servers), "none of them accepts requests; GET /health of each reports why")
    return None


def _servers_too_old(snapshot: Snapshot, status: Status) -> StallCause | None:
    newest = max((server.version for server in snapshot.servers), default=status.version)
    if not _has_work(status) or newest >= status.version - snapshot.max_staleness:
        return None
    return StallCause(
        _ids(snapshot.servers),
        f"their newest weights are version {newest}, version {status.version} is published, and max_staleness "
        f"{snapshot.max_staleness} requires at least {status.version - snapshot.max_staleness}: they do not pull",
    )


def _requests_in_flight(snapshot: Snapshot, status: Status) -> StallCause | None:
    busy = [server for server in snapshot.servers if server.in_flight]
    if not busy or not _leased(status):
        return None
    return StallCause(
        _ids(busy), f"{sum(server.in_flight for server in busy)} requests are in flight and no episode ends"
    )


def _episodes_without_a_request(snapshot: Snapshot, status: Status) -> StallCause | None:
    leased = _leased(status)
    if not leased:
        return None
    holders = {name: count for name, count in status.workers.items() if count}
    names = ", ".join(sorted(holders)) or _named(snapshot.roles, "agent") or "agent workers"
    return StallCause(
        names, f"{leased} episodes are held and no server has a request of them: tools, rewards or the loop"
    )


def _no_worker_leases(snapshot: Snapshot, status: Status) -> StallCause | None:
    queued = status.groups.get("queued", 0)
    if not queued:
        return None
    in_system = sum(status.groups.get(name, 0) for name in ("admitted", "ready", "shipped"))
    room = (snapshot.max_staleness + 1) * snapshot.groups_per_step - in_system
    if room <= 0:
        return StallCause("trainer", f"{in_system} groups are admitted, which is the limit")
    names = _named(snapshot.roles, "agent") or "agent workers"
    return StallCause(
        names, f"{queued} groups are queued, admission has room for {room}, and no worker leases an episode"
    )


def _nothing_to_lease(_scene: Snapshot, status: Status) -> StallCause | None:
    if status.groups.get("queued", 0) or status.groups.get("admitted", 0):
        return None
    if not status.groups.get("submitted", 0):
        return StallCause("trainer", "it has submitted no task yet: it is loading the model or waiting for its ranks")
    return StallCause("trainer", "no task is queued: its feeder submits none")


def _has_work(status: Status) -> bool:
    return bool(status.groups.get("queued", 0) or _leased(status) or _splits(status, "queued"))


def _leased(status: Status) -> int:
    return status.episodes.get("leased", 0) + _splits(status, "leased")


def _splits(status: Status, state: str) -> int:
    return sum(split.get(state, 0) for split in status.other_splits.values())


def _named(roles: Sequence[LocalRole], kind: str) -> str:
    return ", ".join(role.name for role in roles if role.name.startswith(kind))


def _ids(servers: Sequence[ServerInfo]) -> str:
    return ", ".join(sorted(server.server_id for server in servers))
