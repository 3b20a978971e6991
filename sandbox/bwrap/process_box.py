"""A box whose driver is a child process of the worker, at the other end of a socket pair."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Protocol

from penstock.common import Backoff
from penstock.sandbox.box import Box, BoxEnded
from penstock.sandbox.bundle import open_blobs
from penstock.sandbox.bwrap.cgroups import Cgroup
from penstock.sandbox.protocol import SandboxError

START_DEADLINE_S = 20.0
END_DEADLINE_S = 5.0
EXIT_POLL = Backoff(0.001, 0.05)


@dataclass(frozen=True, slots=True)
class BoxCommand:
    """A command line. An argument ``{0}``, ``{1}`` ... stands for a descriptor: see `spawn`."""

    argv: tuple[str, ...]
    blobs: tuple[bytes, ...]
    """Contents of files in memory that the started process reads."""
    cwd: str = "/"
    env: dict[str, str] = field(default_factory=lambda: {"PATH": "/usr/bin:/bin"})
    cgroup: Cgroup | None = None


class BoxProcess(Protocol):
    """The process whose end is the box's: what of `subprocess.Popen` is needed."""

    def poll(self) -> int | None:
        """None while it lives."""

    def kill(self) -> None: ...


class ProcessBox(Box):
    _writer: asyncio.StreamWriter

    def __init__(self, process: BoxProcess, stderr: IO[bytes], cgroup: Cgroup | None) -> None:
        super().__init__()
        self._process = process
        self._stderr = stderr
        self._cgroup = cgroup

    @classmethod
    async def start(cls, command: BoxCommand) -> ProcessBox:
        """Spawned from the event loop's own thread: ``--die-with-parent`` means the thread that started it.

        Raises:
            SandboxError: it did not come up; the text has what it wrote to stderr.
        """
        ours, theirs = socket.socketpair()
        stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `end`
        try:
            with open_blobs(command.blobs) as blobs:
                process = spawn(command, blobs, theirs.fileno(), stderr)
            box = cls(process, stderr, command.cgroup)
        except OSError as error:
            ours.close()
            stderr.close()
            if command.cgroup is not None:
                command.cgroup.remove()
            raise SandboxError(f"the box cannot be started: {error}") from error
        finally:
            theirs.close()
        await box._await_ready(ours)
        return box

    async def _await_ready(self, ours: socket.socket) -> None:
        ours.setblocking(False)
        try:
            self._reader, self._writer = await asyncio.open_unix_connection(sock=ours)
            async with asyncio.timeout(START_DEADLINE_S):
                await self._receive()
        except (BoxEnded, TimeoutError) as error:
            reason = self.stderr_tail or f"no answer in {START_DEADLINE_S:.0f} s"
            await self.end()
            raise SandboxError(f"the box did not start: {reason}") from error
        except BaseException:
            await self.end()
            raise

    @property
    def alive(self) -> bool:
        return self._process.poll() is None and not self._reader.at_eof()

    def new_oom_kills(self) -> int:
        if self._cgroup is not None:
            self._oom_kills = max(self._oom_kills, self._cgroup.oom_kills())  # 0 once the cgroup is removed
        return super().new_oom_kills()

    @property
    def stderr_tail(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read(2000).decode("utf-8", "replace").strip()

    async def end(self) -> None:
        """Everything in the box is gone afterwards, its cgroups included.

        Closing the socket lets the driver go by itself, which takes the whole box with it and leaves no zombie; a
        driver that does not is killed.
        """
        if hasattr(self, "_writer"):
            self._writer.close()
        try:
            if not await self._exited(deadline_s=1.0):
                self._kill()
                await self._exited(END_DEADLINE_S)
            if self._cgroup is not None:
                self._oom_kills = self._cgroup.oom_kills()
                await self._remove(self._cgroup)
        except asyncio.CancelledError:
            self._kill()
            raise
        finally:
            self._stderr.close()

    def _kill(self) -> None:
        if self._cgroup is not None:
            self._cgroup.kill()
        if self._process.poll() is None:
            self._process.kill()

    async def _exited(self, deadline_s: float) -> bool:
        pauses = EXIT_POLL.pauses()
        while self._process.poll() is None:
            if deadline_s <= 0:
                return False
            deadline_s -= await pauses.sleep()
        return True

    @staticmethod
    async def _remove(cgroup: Cgroup) -> None:
        for _ in range(int(END_DEADLINE_S / 0.01)):
            # a thread continues where this task is cancelled
            if await asyncio.to_thread(cgroup.remove) if cgroup.clean_cache else cgroup.remove():
                return
            cgroup.kill()
            await asyncio.sleep(0.01)


def spawn(
    command: BoxCommand, descriptors: Sequence[int], stdin: int, stderr: IO[bytes] | int
) -> subprocess.Popen[bytes]:
    """Starts it with `descriptors`, by whose numbers the arguments ``{0}``, ``{1}`` ... are replaced."""
    numbers = {f"{{{index}}}": str(fd) for index, fd in enumerate(descriptors)}
    return subprocess.Popen(
        [numbers.get(part, part) for part in command.argv],
        stdin=stdin,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        cwd=command.cwd,
        env=command.env,
        pass_fds=descriptors,
    )
