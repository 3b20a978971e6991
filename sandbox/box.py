"""Boxes with a driver inside: the frame protocol, and the driver as a child process of the worker.

A frame is 4 bytes of length (big endian), then JSON. `Box` speaks it over any connection; `ProcessBox` starts the
driver at the other end of a socket pair.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any, Protocol

from penstock.common import Backoff, cancel_and_wait
from penstock.sandbox.bundle import open_blob
from penstock.sandbox.cgroups import Cgroup
from penstock.sandbox.connections import BoxConnections
from penstock.sandbox.protocol import Accept, SandboxError

MAX_FRAME_BYTES = 64 << 20
OnOutput = Callable[[str, str], None]
"""(stream, text): a piece of output, as it comes."""
_LENGTH = struct.Struct(">I")


class BoxEnded(SandboxError):
    """The driver's end of its connection closed."""


class Writer(Protocol):
    """What of asyncio's StreamWriter is needed."""

    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None:
        """Raises `ConnectionError` where the other end is gone."""


class Box(ABC):
    """A started driver. One request at a time; the owner awaits `end` whatever happened."""

    _reader: asyncio.StreamReader
    _writer: Writer

    def __init__(self) -> None:
        self._requests = 0
        self.port: int | None = None
        """Of its loopback, where one was opened for served runs."""

    @property
    @abstractmethod
    def alive(self) -> bool: ...

    @property
    @abstractmethod
    def stderr_tail(self) -> str:
        """What the driver wrote to its stderr."""

    @property
    def broken_limit(self) -> str | None:
        """A limit for which the whole box was ended."""
        return None

    @abstractmethod
    def new_oom_kills(self) -> int:
        """Processes of this box that ran out of memory since the last call; also after its end."""

    @abstractmethod
    async def end(self) -> None:
        """Everything in the box is gone afterwards."""

    async def request(
        self, command: dict[str, Any], deadline_s: float, on_output: OnOutput | None = None
    ) -> dict[str, Any]:
        """The driver's answer; `on_output` is called with the output that arrives before it.

        Raises `BoxEnded`, or `TimeoutError` past the deadline: end the box then.
        """
        self._requests += 1
        async with asyncio.timeout(deadline_s):
            await self._send({**command, "id": self._requests})
            while "out" in (answer := await self._receive_answer()):
                if on_output is not None:
                    on_output(answer["out"], answer["data"])
        return answer

    async def request_served(
        self, command: dict[str, Any], deadline_s: float, accept: Accept, stop: asyncio.Event | None
    ) -> dict[str, Any]:
        """The same for a served run: its connections go to `accept`, and are closed when the answer is here."""
        self._requests += 1
        connections = BoxConnections(self._send, accept)
        stopping = asyncio.create_task(self._stop_after(stop))
        try:
            async with asyncio.timeout(deadline_s):
                await self._send({**command, "id": self._requests})
                while "conn" in (frame := await self._receive()):
                    connections.take(frame)
        finally:
            await cancel_and_wait([stopping])
            await connections.close()
        return self._answer(frame)

    async def _stop_after(self, stop: asyncio.Event | None) -> None:
        if stop is not None:
            await stop.wait()
            await self._send({"stop": True})

    async def _send(self, frame: dict[str, Any]) -> None:
        body = json.dumps(frame).encode("ascii")
        try:
            self._writer.write(_LENGTH.pack(len(body)) + body)
            await self._writer.drain()
        except ConnectionError as error:
            raise BoxEnded("the box closed its socket") from error

    async def _receive_answer(self) -> dict[str, Any]:
        return self._answer(await self._receive())

    def _answer(self, frame: dict[str, Any]) -> dict[str, Any]:
        if frame.get("id") != self._requests:
            raise BoxEnded("the box broke its protocol")
        return frame

    async def _receive(self) -> dict[str, Any]:
        try:
            (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if size > MAX_FRAME_BYTES:
                raise BoxEnded(f"the box sent a frame of {size} bytes")
            answer = json.loads(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError, ValueError) as error:
            raise BoxEnded(f"the box ended ({self.stderr_tail or 'it said nothing'})") from error
        if not isinstance(answer, dict):
            raise BoxEnded("the box broke its protocol")
        return answer


START_DEADLINE_S = 20.0
END_DEADLINE_S = 5.0
EXIT_POLL = Backoff(0.001, 0.05)


@dataclass(frozen=True, slots=True)
class BoxCommand:
    """How to start one box. An argument ``{0}``, ``{1}`` ... stands for the descriptor of that blob."""

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
        self._oom_kills_seen = 0
        self._oom_kills_at_end: int | None = None

    @classmethod
    async def start(cls, command: BoxCommand) -> ProcessBox:
        """Spawned from the event loop's own thread: ``--die-with-parent`` means the thread that started it.

        Raises:
            SandboxError: it did not come up; the text has what it wrote to stderr.
        """
        ours, theirs = socket.socketpair()
        stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `end`
        try:
            box = cls(_spawn(command, theirs, stderr), stderr, command.cgroup)
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
        """Processes of this box that ran out of memory since the last call; also after its end."""
        if self._cgroup is None:
            return 0
        total = self._cgroup.oom_kills() if self._oom_kills_at_end is None else self._oom_kills_at_end
        new, self._oom_kills_seen = total - self._oom_kills_seen, total
        return new

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
                self._oom_kills_at_end = self._cgroup.oom_kills()
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
            if cgroup.remove():
                return
            cgroup.kill()
            await asyncio.sleep(0.01)


def _spawn(command: BoxCommand, control: socket.socket, stderr: IO[bytes]) -> subprocess.Popen[bytes]:
    blobs = [open_blob(content) for content in command.blobs]
    numbers = {f"{{{index}}}": str(fd) for index, fd in enumerate(blobs)}
    try:
        return subprocess.Popen(
            [numbers.get(part, part) for part in command.argv],
            stdin=control.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            cwd=command.cwd,
            env=command.env,
            pass_fds=blobs,
        )
    finally:
        for fd in blobs:
            os.close(fd)
