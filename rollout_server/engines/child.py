"""A child process with a private log, and how it ended, in words."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.common import describe_exit
from penstock.common.log_files import open_log


def engine_logs(log_dir: Path, name: str) -> Path:
    """Folder for the logs of the engine of rollout server `name`."""
    return log_dir / f"{name}-engine"


def up_file(logs: Path) -> Path:
    """File that is locked while the engine with these logs is up, see `common.until_up`."""
    return logs / "up.lock"


class Child:
    """One process at a time, started by `spawn`. The owner ends it."""

    def __init__(self, name: str, log_path: Path) -> None:
        self.name = name
        """Name of the process in messages."""
        self.log_path = log_path
        self.process: asyncio.subprocess.Process | None = None
        self._log_start = 0

    @property
    def alive(self) -> bool:
        """The process was started and has not ended."""
        return self.process is not None and self.process.returncode is None

    @property
    def pid(self) -> int | None:
        """Number of the process, and of its process group."""
        return self.process.pid if self.process else None

    async def spawn(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdin: int = asyncio.subprocess.DEVNULL,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start `command` in its own session: Ctrl-C reaches the owner, who lets it finish what is in flight."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with open_log(self.log_path) as log:
            self._log_start = log.tell()
            self.process = await asyncio.create_subprocess_exec(
                *command,
                stdin=stdin,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=pass_fds,
                start_new_session=True,
            )

    def tail(self, lines: int = 25) -> str:
        """The last lines of the log, and how the process ended if it did so by itself."""
        size = self.log_path.stat().st_size if self.log_path.exists() else 0
        last_lines = self._log(max(self._log_start, size - 16384)).splitlines()[-lines:]
        return "\n".join(last_lines + ([f"{self.name} {self.end_of_it}"] if self.end_of_it else []))

    def cause(self) -> str:
        """The first exception in the log that is not just a warning, else the log's end. One is reported many times."""
        lines = [line for line in self._log(self._log_start).splitlines() if "WARNING" not in line]
        exception = re.compile(r"(?:^|\s)(\w*(?:Error|Exception|error): .+)$")
        match = next(filter(None, map(exception.search, lines)), None)
        return f"{match[1]} (see {self.log_path})" if match else f"{self.log_path} ends with:\n{self.tail()}"

    @property
    def end_of_it(self) -> str:
        """Cause of the end of the process, or of one behind it, in words; empty while it runs and before the start."""
        if self.process is None:
            return ""
        status = self.process.returncode
        if status:
            return describe_exit(status)
        # One of the processes behind it may have ended; the others may still be ending.
        log = self._log(self._log_start)
        if killed := re.findall(r"(?:exit ?code|terminated with):? (-\d+)", log, re.IGNORECASE):
            return describe_exit(int(killed[-1]))
        # Of vLLM's engine core the first comes always, the second only if it could speak.
        if "exited unexpectedly" in log and "encountered a fatal error" not in log:
            return "lost a process that said nothing: it was killed, perhaps by the kernel for want of memory"
        return "" if status is None else describe_exit(status)

    def _log(self, start: int) -> str:
        """Return the log from byte `start` on; empty if there is none."""
        try:
            with self.log_path.open("rb") as file:
                file.seek(start)
                return file.read().decode(errors="replace")
        except OSError:
            return ""
