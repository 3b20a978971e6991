"""A stock inference server as a child process: its process group, its log, its end. vLLM and SGLang are both one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from penstock.rollout_server.engines import guard
from penstock.rollout_server.protocol import EngineError


class ChildServer:
    """One server process under `guard`, and its log. `http` is set by whoever knows where the server listens."""

    def __init__(self, name: str, log_path: Path, start_timeout_s: float) -> None:
        self.name = name
        """As people write it, for messages."""
        self.log_path = log_path
        self.start_timeout_s = start_timeout_s
        self.http: httpx.AsyncClient
        self._process: asyncio.subprocess.Process | None = None
        self._log_start = 0

    @property
    def alive(self) -> bool:
        """The process was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int | None:
        """Of the guard, which is also the process group's number."""
        return self._process.pid if self._process else None

    def tail(self, lines: int = 25) -> str:
        """The last lines of the server's log."""
        try:
            with self.log_path.open("rb") as file:
                file.seek(max(0, self.log_path.stat().st_size - 16384))
                return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""

    def cause(self) -> str:
        """The first exception since the server began its log entry, else the log's end. One is reported many times."""
        found = re.search(r"(?:^|\s)(\w*(?:Error|Exception|error): .+)$", self._log_of_this_run(), re.MULTILINE)
        return f"{found[1]} (see {self.log_path})" if found else f"{self.log_path} ends with:\n{self.tail()}"

    async def spawn(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start `command`; it ends with this process, however this one ends."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                guard.__file__,
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    async def until_answering(self, path: str) -> None:
        """Returns once GET `path` is answered with 200. Raises `EngineError` with the log's end otherwise."""
        deadline = time.monotonic() + self.start_timeout_s
        while time.monotonic() < deadline:
            if not self.alive:
                raise EngineError(f"{self.name} ended while it started: {self.cause()}")
            with contextlib.suppress(httpx.HTTPError):
                if (await self.http.get(path, timeout=5)).status_code == httpx.codes.OK:
                    return
            await asyncio.sleep(0.2)
        raise EngineError(
            f"{self.name} was not up within {self.start_timeout_s:g} s; its log ends with:\n{self.tail()}"
        )

    async def end(self) -> None:
        """End the whole process group; a second call does nothing."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()  # the guard sees the end of its input
        try:
            await asyncio.wait_for(process.wait(), guard.GRACE_S + 5)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    def _log_of_this_run(self) -> str:
        try:
            with self.log_path.open("rb") as file:
                file.seek(self._log_start)
                return file.read().decode(errors="replace")
        except OSError:
            return ""
