"""Child processes of a run: each in its own session, restarted with back-off, ended with everything it started.

starting ──► running ──exit 0──► finished
   ▲            │ exit ≠ 0
   └─ back-off ─┘ (at most max_restarts times in any RESTART_WINDOW_S, then failed)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from penstock.common import LIFE_VARIABLE, PARENT_VARIABLE, Backoff, kill_group
from penstock.common.device_locks import named_gpus

RESTART_WINDOW_S = 3600.0
"""Earlier restarts of a role are forgotten."""
RESTARTS_VARIABLE = "PENSTOCK_RESTARTS"
"""Variable with the number of restarts of the role; an agent worker then begins with fewer episodes."""
STOP_FILE_VARIABLE = "PENSTOCK_STOP_FILE"
"""File in which a role writes why it must not be restarted, before it exits."""


@dataclass(frozen=True)
class RoleSpec:
    """The command, environment and log of one role."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    log: Path
    max_restarts: int
    stop_grace_s: float = 15.0
    cwd: Path | None = None
    """None: the directory of the parent."""

    @property
    def stop_file(self) -> Path:
        return self.log.with_suffix(".stop")


@dataclass(frozen=True, slots=True)
class EndedProcess:
    """A process of a role that has ended, with the name of its life."""

    life: str
    device_s: float
    """Time of its GPUs, or without any its CPU time: of the process, and of its descendants that were waited for."""
    was_killed: bool
    """Another exit status than 0."""


class RoleFailed(Exception):
    """A role failed permanently; the message ends with the last lines of its log."""

    @property
    def why(self) -> str:
        """The first line of the message."""
        return str(self).partition("\n")[0]


class RestartBudget:
    """At most `limit` restarts in any window: a long run outlives crashes that are far apart."""

    def __init__(self, limit: int, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit, self.window_s = limit, window_s
        self._clock = clock
        self._spent: deque[float] = deque()

    def spend(self) -> bool:
        """Counts a restart. Returns False if it is one too many."""
        now = self._clock()
        self._spent.append(now)
        while self._spent[0] <= now - self.window_s:
            self._spent.popleft()
        return len(self._spent) <= self.limit

    def forgive(self) -> None:
        """Forget the restarts so far: their cause is gone."""
        self._spent.clear()

    @property
    def used_up(self) -> str:
        return f"{self.limit} restarts used up within {self.window_s:g} s"


class RoleProcess:
    """Owns one role's process over all its restarts. `run` until it ends; `stop` ends it from outside."""

    def __init__(self, spec: RoleSpec, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` in seconds."""
        self.spec = spec
        self.pid: int | None = None
        self.restarts = 0
        self.has_failed = False
        self._stopping = False
        self._ended = asyncio.Event()
        self._lives: list[EndedProcess] = []
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix=f"end of {spec.name}")
        self._pauses = Backoff(0.5, 10.0).pauses()
        self._clock = clock
        self._budget = RestartBudget(spec.max_restarts, RESTART_WINDOW_S, clock)

    @property
    def state(self) -> str:
        """``running``, ``not running``, ``failed`` for good, or ``stopped`` by request."""
        if self.has_failed:
            return "failed"
        if self.pid is not None:
            return "running"
        return "stopped" if self._stopping else "not running"

    async def run(self) -> None:
        """Start, watch, restart. Returns when the role exits 0 or was stopped; raises `RoleFailed`."""
        while not self._stopping:
            started = self._clock()
            status = await self._run_once()
            if status == 0:
                return
            if self.spec.stop_file.exists():
                raise RoleFailed(f"{self.spec.name} stopped the run: {self.spec.stop_file.read_text().strip()}")
            if self._stopping:
                return
            if self._clock() - started > 60.0:  # it was healthy
                self._pauses.reset()
            self.restarts += 1
            if not self._budget.spend():
                cause = f"exit status {status}, {self._budget.used_up}"
                last = self._log_tail(1).strip()
                raise RoleFailed(
                    f"{self.spec.name} failed ({cause}): {last}; {self.spec.log} ends:\n{self._log_tail()}"
                )
            await self._pauses.sleep()

    def forgive(self) -> None:
        """See `SupervisedRole`."""
        self._budget.forgive()

    def take_ended(self) -> list[EndedProcess]:
        """Return the processes that have ended since the last call."""
        ended, self._lives = self._lives, []
        return ended

    async def stop(self) -> None:
        """SIGTERM to the role, a grace period, then SIGKILL to its whole session."""
        self._stopping = True
        if self.pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.spec.stop_grace_s):
                    await self._ended.wait()
        finally:
            self.kill()  # also if a second Ctrl-C ends the grace period

    def kill(self) -> None:
        """SIGKILL to everything in the role's session that is still in its process group."""
        kill_group(self.pid)

    async def _run_once(self) -> int:
        self.spec.stop_file.unlink(missing_ok=True)
        life, began = secrets.token_hex(4), time.monotonic()
        process = self._start(life)
        self.pid = process.pid
        self._ended.clear()
        try:
            status, cpu_s = await asyncio.get_running_loop().run_in_executor(self._waiter, _reap, process)
        finally:
            self.kill()  # processes of a dead role must not outlive it
            self.pid = None
            self._ended.set()
        gpus = len(named_gpus(self.spec.env.get("CUDA_VISIBLE_DEVICES", "")))
        device_s = (time.monotonic() - began) * gpus if gpus else cpu_s
        self._lives.append(EndedProcess(life, device_s, was_killed=status != 0))
        return status

    def _start(self, life: str) -> subprocess.Popen[bytes]:
        more = {
            RESTARTS_VARIABLE: str(self.restarts),
            STOP_FILE_VARIABLE: str(self.spec.stop_file),
            LIFE_VARIABLE: life,
            PARENT_VARIABLE: str(os.getpid()),
        }
        with self.spec.log.open("ab") as log:
            return subprocess.Popen(
                self.spec.argv,
                env={**self.spec.env, **more},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=self.spec.cwd,
            )

    def _log_tail(self, lines: int = 12) -> str:
        text = self.spec.log.read_text(errors="replace") if self.spec.log.exists() else ""
        return "\n".join(f"    {line}" for line in text.splitlines()[-lines:])


def _reap(process: subprocess.Popen[bytes]) -> tuple[int, float]:
    """Wait for a child. Return its exit status, and the CPU seconds of it and of the descendants that it waited for."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, usage.ru_utime + usage.ru_stime
