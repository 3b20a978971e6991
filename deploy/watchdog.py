"""Names the part that holds a run up, has every local role write its stacks, and ends the run where it is to.

    every second: progress? ──no, for stall_timeout_s──► find_stuck ─► stacks into logs/NAME.log ─► warn | stop

Progress is any of: a step told in metrics.jsonl, a version, a commit, a finished episode, a submitted task, a split's
counts, and a server or worker that comes for the first time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.deploy.config import RunConfig
from penstock.deploy.process_tree import Processes, ask_for_stacks
from penstock.deploy.processes import RoleSpec
from penstock.deploy.stuck import LocalRole, Scene, Stuck, find_stuck
from penstock.transfer_queue import ServerInfo, Status

STACKS_S = 2.0
"""A role is given so long to write its stacks before it may be stopped."""


class StalledRun(Exception):
    """Nothing moved for longer than `stall_timeout_s`; the message says which part holds the others up."""

    def __init__(self, quiet_s: float, stuck: Stuck, scene: str) -> None:
        super().__init__(f"no progress for {quiet_s:.0f} s; stuck is {stuck}\n{scene}")
        self.why = f"no progress for {quiet_s:.0f} s; stuck is {stuck}"
        """In one line."""


class Watched(Protocol):
    """A role under supervision, on this machine or elsewhere; of a local one there is a `pid` while it runs."""

    spec: RoleSpec

    @property
    def restarts(self) -> int: ...

    @property
    def state(self) -> str:
        """``not running``, or anything else."""


class Watchdog:
    """`look` is called once a second by the reporter."""

    def __init__(self, config: RunConfig, processes: Sequence[Watched], say: Callable[[str], None]) -> None:
        self._config = config
        self._processes = processes
        self._say = say
        self._fingerprint: tuple[int, ...] = ()
        self._quiet_since = time.monotonic()
        self._seen: set[str] = set()
        """Servers and workers that ever came: each is progress once, a server that comes and goes is none."""
        self._used_s: dict[int, float] | None = None
        """CPU time of each role's tree when it became quiet, by pid; None while things move."""

    async def look(self, steps_done: int, status: Status | None, servers: Sequence[ServerInfo]) -> None:
        """Raises `StalledRun` where nothing has moved for too long and `stall_action` is to stop."""
        if status is not None and self._moved(steps_done, status, servers):
            self._begin_again()
            return
        if self._used_s is None:
            self._used_s = await asyncio.to_thread(self._measure)
        quiet_s = time.monotonic() - self._quiet_since
        if quiet_s <= self._config.stall_timeout_s:
            return
        scene = await asyncio.to_thread(self._scene, status, servers)
        stalled = StalledRun(quiet_s, find_stuck(scene), self._who_waits(scene))
        self._say(str(stalled))
        await self._have_stacks_written()
        if self._config.stall_action == "stop":
            raise stalled
        self._begin_again()

    def _moved(self, steps_done: int, status: Status, servers: Sequence[ServerInfo]) -> bool:
        self._seen.update(status.workers, (server.server_id for server in servers))
        splits = (count for split in status.other_splits.values() for count in split.values())
        done = (steps_done, status.version, status.episodes.get("completed", 0), status.committed_step)
        counts = (*done, status.groups.get("submitted", 0), len(self._seen), *splits)
        before, self._fingerprint = self._fingerprint, counts
        return counts != before

    def _begin_again(self) -> None:
        self._quiet_since, self._used_s = time.monotonic(), None

    def _measure(self) -> dict[int, float]:
        now = Processes.now()
        return {pid: now.cpu_s(pid) for pid in self._pids().values()}

    def _pids(self) -> dict[str, int]:
        """Of the roles that run on this machine."""
        pids = ((process.spec.name, getattr(process, "pid", None)) for process in self._processes)
        return {name: pid for name, pid in pids if pid is not None}

    async def _have_stacks_written(self) -> None:
        asked = await asyncio.to_thread(ask_for_stacks, list(self._pids().values()))
        if asked:
            self._say(f"  stacks of {len(asked)} local processes are at the ends of logs/NAME.log")
            await asyncio.sleep(STACKS_S)

    def _scene(self, status: Status | None, servers: Sequence[ServerInfo]) -> Scene:
        config, now = self._config, Processes.now()
        roles = [self._local(process, now) for process in self._processes]
        return Scene(status, servers, roles, config.groups_per_step, config.max_staleness, config.trainer.steps)

    def _local(self, process: Watched, now: Processes) -> LocalRole:
        name, running = process.spec.name, not process.state.startswith("not running")
        pid = self._pids().get(name)
        if pid is None:
            return LocalRole(name, running=running, restarts=process.restarts)
        used_s = max(0.0, now.cpu_s(pid) - (self._used_s or {}).get(pid, 0.0))
        return LocalRole(name, running=running, held=now.is_held(pid), restarts=process.restarts, cpu_s=used_s)

    def _who_waits(self, scene: Scene) -> str:
        logs = {process.spec.name: process.spec.log for process in self._processes}
        lines = [
            f"  {role.name}: {'running' if role.running else 'not running'}, {role.restarts} restarts, "
            f"{role.cpu_s:.1f} s of CPU meanwhile, see {logs[role.name]}"
            for role in scene.roles
        ]
        for server in scene.servers:
            taking = "takes requests" if server.accepting else "takes none"
            lines.append(f"  {server.server_id}: version {server.version}, {server.in_flight} in flight, {taking}")
        if scene.status is not None:
            found = scene.status
            lines.append(
                f"  queue: version {found.version}, groups {dict(found.groups)}, episodes {dict(found.episodes)}"
            )
        return "\n".join(lines)
