"""Supervises the roles of a run wherever they run: starts, adds, removes and stops them, and detects stalls.

    Placement ──place(role)──► SupervisedRole: one role's process over all its restarts, here or on another machine
        ▲                         │ one task each; the first permanent failure ends the run
    Supervisor ◄──────────────────┘ done when the trainer has finished

    Watchdog, every second: progress? ──no, for stall_timeout_s──► diagnose_stall ─► stacks into logs/ ─► stop

Progress is any of: a step in metrics.jsonl, a version, a commit, a finished episode, a submitted task, a change in the
counts of a split, a new server or worker.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from penstock.common import ProcessTable
from penstock.deploy.config import RunConfig
from penstock.deploy.run.plan import LOADS_AFTER_VARIABLE, VARIABLE, Role, gpus_of, visible_gpus
from penstock.deploy.run.processes import EndedProcess, RoleFailed, RoleProcess, RoleSpec
from penstock.deploy.run.stacks import ask_for_stacks, is_suspended
from penstock.deploy.run.stall import LocalRole, Snapshot, StallCause, diagnose_stall
from penstock.deploy.run_dir import RunDir
from penstock.transfer_queue import ServerInfo, Status

logger = logging.getLogger("penstock.run")


class SupervisedRole(Protocol):
    """One role's process. `run` is called once; `stop` at any time, also before and after."""

    spec: RoleSpec
    has_failed: bool
    """Permanent failure of the role; set by the supervisor."""

    @property
    def pid(self) -> int | None:
        """Process id on this machine; None while the role does not run here."""
        ...

    @property
    def restarts(self) -> int: ...

    @property
    def state(self) -> str:
        """State in words: running or not, and where."""
        ...

    async def run(self) -> None:
        """Until it finished or was stopped. Raises `RoleFailed`."""
        ...

    def forgive(self) -> None:
        """Restarts so far do not count against its limit any more."""
        ...

    def take_ended(self) -> Sequence[EndedProcess]:
        """Return its processes on this machine that have ended since the last call."""
        ...

    async def stop(self) -> None: ...


class Placement(Protocol):
    """The machines on which a run's roles run."""

    def open(self, config: RunConfig, run: RunDir) -> AbstractAsyncContextManager[None]:
        """Entered before the first `place`, left when every member has been stopped. Raises `ConfigError`."""
        ...

    def place(self, role: Role, run: RunDir) -> SupervisedRole: ...

    def helpers(self, supervisor: Supervisor) -> Sequence[Coroutine[Any, Any, None]]:
        """Work next to the run; cancelled at its end. An error of theirs ends the run."""
        ...


class LocalPlacement:
    """This machine: child processes, each with the GPUs that are its own."""

    def __init__(self) -> None:
        self._own_gpus: Callable[[Role], Sequence[str] | None] = lambda role: None
        self._gpus_of_servers: dict[str, set[str]] = {}
        """GPUs of rollout servers that take no turns with the trainer."""
        self._in_turns = False

    @asynccontextmanager
    async def open(self, config: RunConfig, run: RunDir) -> AsyncIterator[None]:
        gpus = await asyncio.to_thread(visible_gpus)
        self._own_gpus, self._in_turns = partial(gpus_of, config=config, gpus=gpus), config.placement.in_turns
        yield

    def place(self, role: Role, run: RunDir) -> RoleProcess:
        own = self._own_gpus(role)
        if own is not None:
            env = {**role.env, VARIABLE: ",".join(own)}
            if role.kind == "rollout" and not self._in_turns:
                self._gpus_of_servers[role.name] = set(own)
            # The trainer, which is placed last, loads after the servers on its GPUs.
            elif sharing := [name for name, gpus in self._gpus_of_servers.items() if gpus & set(own)]:
                env[LOADS_AFTER_VARIABLE] = ",".join(sharing)
            role = replace(role, env=env)
        return RoleProcess(role.spec(run.logs))

    def helpers(self, supervisor: Supervisor) -> Sequence[Coroutine[Any, Any, None]]:
        return ()


class Supervisor:
    """`add` the roles, `run` until the trainer has finished, `stop`."""

    def __init__(self, place: Callable[[Role], SupervisedRole], more: Callable[[str, int], Role]) -> None:
        """`more(kind, number)` makes the role of one more server or worker."""
        self.members: list[SupervisedRole] = []
        """All there ever were, in the order in which they came."""
        self._place, self._more = place, more
        self._roles: dict[str, Role] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._failed = set[str]()
        """Servers that failed for good, without which the run continues."""
        self._changed = asyncio.Event()

    def add(self, role: Role) -> None:
        member = self._place(role)
        self.members.append(member)
        self._roles[role.name] = role
        self._tasks[role.name] = asyncio.create_task(member.run(), name=role.name)
        self._changed.set()

    def resize(self, kind: str, count: int) -> None:
        """Changes the number of servers or workers: the newest leave first, and no name is used twice."""
        present = self.present(kind)
        used = [role.number for role in self._roles.values() if role.kind == kind and role.number is not None]
        fresh = itertools.count(max(used, default=-1) + 1)
        for _ in range(count - len(present)):
            self.add(self._more(kind, next(fresh)))
        for role in present[count:]:
            member = next(m for m in self.members if m.spec.name == role.name)
            self._leaving[role.name] = asyncio.create_task(member.stop(), name=f"{role.name} leaves")

    def present(self, kind: str) -> list[Role]:
        """Return the roles of a kind that may be added and removed, oldest first, without those that leave or failed
        for good.
        """
        gone = self._leaving.keys() | self._failed
        return [r for r in self._roles.values() if r.kind == kind and r.number is not None and r.name not in gone]

    def forgive(self, kind: str) -> None:
        """Restarts so far of all roles of a kind do not count any more."""
        for member in self.members:
            if self._roles[member.spec.name].kind == kind:
                member.forgive()

    async def run(self, helpers: Sequence[asyncio.Task[None]]) -> None:
        """Until the trainer has finished. Raises what a role or a task of `helpers` raised first."""
        while not self._over(helpers):
            changed = asyncio.create_task(self._changed.wait(), name="supervisor changed")
            try:
                pending = {task for task in (*self._tasks.values(), *helpers) if not task.done()}
                await asyncio.wait({*pending, changed}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()
            self._changed.clear()

    def _over(self, helpers: Sequence[asyncio.Task[None]]) -> bool:
        """Raises a permanent failure of a role, a stall or Ctrl-C, which ends the run."""
        for name, task in self._tasks.items():
            if task.done() and name not in self._failed:
                self._check_end(self._roles[name], task)
        for task in helpers:
            if task.done():
                task.result()
        return any(self._tasks[name].done() for name, role in self._roles.items() if role.kind == "trainer")

    def _check_end(self, role: Role, task: asyncio.Task[None]) -> None:
        """Raises the failure of a role that the run cannot do without; a server of several leaves the run."""
        try:
            task.result()
        except RoleFailed as error:
            self._failed.add(role.name)
            next(m for m in self.members if m.spec.name == role.name).has_failed = True
            servers = [
                one.name for one in self._roles.values() if one.is_one_of_several and one.name not in self._leaving
            ]
            remaining = [name for name in servers if name not in self._failed]
            # With fewer than half of the servers left, what ends them is taken to be no server's own fault.
            if not role.is_one_of_several or len(remaining) < 0.5 * len(servers):
                raise
            logger.error("%s\nthe run continues with %d of %d rollout servers", error, len(remaining), len(servers))

    async def stop(self) -> RoleFailed | None:
        """Stops the trainer (saves a checkpoint), then agent workers (return leases), then servers. Never raises.

        Returns the trainer's failure: its last checkpoint is not saved.
        """
        for kind in ("trainer", "agent", "rollout"):
            ending = [m.stop() for m in self.members if self._roles[m.spec.name].kind == kind]
            await asyncio.gather(*ending, return_exceptions=True)
        await asyncio.gather(*self._tasks.values(), *self._leaving.values(), return_exceptions=True)
        trainers = [self._tasks[name] for name, role in self._roles.items() if role.kind == "trainer"]
        ends = await asyncio.gather(*trainers, return_exceptions=True)
        return next((end for end in ends if isinstance(end, RoleFailed)), None)


class StalledRun(Exception):
    """No progress for longer than `stall_timeout_s`; the message names the stalled component."""

    def __init__(self, quiet_s: float, stuck: StallCause, snapshot: str) -> None:
        super().__init__(f"no progress for {quiet_s:.0f} s; stuck is {stuck}\n{snapshot}")
        self.why = f"no progress for {quiet_s:.0f} s; stuck is {stuck}"
        """The reason in one line."""


class VersionRefused(Exception):
    """No rollout server can load the newest version: what they sample grows older until the run stops."""

    def __init__(self, version: int, servers: Sequence[ServerInfo]) -> None:
        names, reason = ", ".join(server.server_id for server in servers), servers[0].refusal
        super().__init__(
            f"no rollout server can load version {version} ({names}): {reason}. Where a tensor is named, trainer and "
            "engine know this model by different tensors: another rollout.engine or model; where a file or checksum "
            "is, another rollout.weight_transport or rollout.weights_dir. --resume publishes the version again"
        )

    @property
    def why(self) -> str:
        return str(self)


class Watchdog:
    """`look` is called once a second by the reporter."""

    def __init__(
        self,
        config: RunConfig,
        processes: Sequence[SupervisedRole],
        say: Callable[[str], None],
        forgive_workers: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self._processes = processes
        self._say = say
        self._forgive_workers = forgive_workers
        self._ended: tuple[int, int] | None = None
        """Episodes that killed their workers, and completed ones, at the last look."""
        self._given_up_in_a_row = 0
        self._refused: int | None = None
        """The version that every server refused at the last look."""
        self._fingerprint: tuple[int, ...] = ()
        self._quiet_since = time.monotonic()
        self._seen: set[str] = set()
        """Servers and workers seen so far: each counts as progress once, so that a flapping server is none."""
        self._used_s: dict[int, float] | None = None
        """CPU time of each role's tree when it became quiet, by pid; None while things move."""

    async def look(self, steps_done: int, status: Status | None, servers: Sequence[ServerInfo]) -> None:
        """Raises `VersionRefused`; `StalledRun` where nothing has moved for too long."""
        self._check_refusals(status, servers)
        if status is not None:
            self._forgive(status)
        if status is not None and self._moved(steps_done, status, servers):
            self._quiet_since, self._used_s = time.monotonic(), None
            return
        if self._used_s is None:
            now = await asyncio.to_thread(ProcessTable.now)
            self._used_s = {pid: now.cpu_s(pid) for pid in self._pids()}
        quiet_s = time.monotonic() - self._quiet_since
        if quiet_s <= self._config.stall_timeout_s:
            return
        config, now = self._config, await asyncio.to_thread(ProcessTable.now)
        roles = [self._local(process, now) for process in self._processes if not process.has_failed]
        snapshot = Snapshot(status, servers, roles, config.groups_per_step, config.max_staleness, config.trainer.steps)
        stalled = StalledRun(quiet_s, diagnose_stall(snapshot), self._who_waits(snapshot))
        self._say(f"no progress for {quiet_s:.0f} s: the run is stopped")  # who catches the error prints the rest
        pids = await asyncio.to_thread(ask_for_stacks, self._pids())
        if pids:
            self._say(f"  stacks of {len(pids)} local processes are at the end of logs/NAME.log")
            await asyncio.sleep(2.0)  # time for a role to write its stacks before it may be stopped
        raise stalled

    def _check_refusals(self, status: Status | None, servers: Sequence[ServerInfo]) -> None:
        """Raises `VersionRefused` at the second look in a row: a version may be replaced between two answers."""
        serving = [server for server in servers if not server.evaluates]
        refused = status is not None and serving and all(server.refused == status.version for server in serving)
        version = status.version if status is not None and refused else None
        if version is not None and version == self._refused:
            raise VersionRefused(version, serving)
        self._refused = version

    def _forgive(self, status: Status) -> None:
        """An episode that ends its workers is a dead letter after some of them: their restarts do not count any more.

        A row of eight such episodes costs some twenty restarts, more than one worker may have.
        """
        given_up, completed = status.episodes.get("killed_workers", 0), status.episodes.get("completed", 0)
        given_up_before, completed_before = self._ended or (given_up, completed)
        self._ended = given_up, completed
        if completed > completed_before:
            self._given_up_in_a_row = 0
        if given_up > given_up_before:
            self._given_up_in_a_row += given_up - given_up_before
            # After 16 of them with none completed in between, workers die of anything: no restart is forgiven.
            if self._given_up_in_a_row <= 16:
                self._forgive_workers()

    def _moved(self, steps_done: int, status: Status, servers: Sequence[ServerInfo]) -> bool:
        self._seen.update(status.workers, (server.server_id for server in servers))
        splits = (count for split in status.other_splits.values() for count in split.values())
        done = (steps_done, status.version, status.episodes.get("completed", 0), status.committed_step)
        counts = (*done, status.groups.get("submitted", 0), len(self._seen), *splits)
        before, self._fingerprint = self._fingerprint, counts
        return counts != before

    def _pids(self) -> list[int]:
        """Return process ids of the roles that run on this machine."""
        return [pid for process in self._processes if (pid := process.pid) is not None]

    def _local(self, process: SupervisedRole, now: ProcessTable) -> LocalRole:
        name, running = process.spec.name, not process.state.startswith("not running")
        if (pid := process.pid) is None:
            return LocalRole(name, running=running, restarts=process.restarts)
        used_s = max(0.0, now.cpu_s(pid) - (self._used_s or {}).get(pid, 0.0))
        return LocalRole(
            name, running=running, is_suspended=is_suspended(now, pid), restarts=process.restarts, cpu_s=used_s
        )

    def _who_waits(self, snapshot: Snapshot) -> str:
        logs = {process.spec.name: process.spec.log for process in self._processes}
        lines = [
            f"  {role.name}: {'running' if role.running else 'not running'}, {role.restarts} restarts, "
            f"{role.cpu_s:.1f} s of CPU since then, see {logs[role.name]}"
            for role in snapshot.roles
        ]
        for server in snapshot.servers:
            taking = "accepts requests" if server.accepting else "accepts none"
            lines.append(f"  {server.server_id}: version {server.version}, {server.in_flight} in flight, {taking}")
        if snapshot.status is not None:
            status = snapshot.status
            lines.append(
                f"  queue: version {status.version}, groups {dict(status.groups)}, episodes {dict(status.episodes)}"
            )
        return "\n".join(lines)
