"""Boxes forked by a zygote (`inside.zygote`): a process of this worker that has the driver loaded, in prepared mounts.

start     ─► request with descriptors ─► zygote forks ─► its answers, in the order of the requests: a pidfd each
the zygote's end ─► every box of it ends, requests under way fail, the next request starts another one
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import tempfile
from collections import deque
from collections.abc import Iterator
from typing import IO

from penstock.sandbox.bundle import open_blobs
from penstock.sandbox.bwrap.cgroups import Cgroup
from penstock.sandbox.bwrap.process_box import (
    END_DEADLINE_S,
    EXIT_POLL,
    START_DEADLINE_S,
    BoxCommand,
    ProcessBox,
    spawn,
)
from penstock.sandbox.protocol import SandboxError

_ANSWER_BYTES = 4096


class ForkedProcess:
    """The driver of a box: the zygote's child, known to this process by its pidfd."""

    def __init__(self, pidfd: int) -> None:
        self._pidfd = pidfd
        self._poller = select.poll()
        self._poller.register(pidfd, select.POLLIN)

    def poll(self) -> int | None:
        """None while it lives."""
        return 0 if self._pidfd < 0 or self._poller.poll(0) else None

    def kill(self) -> None:
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def wait(self, deadline_s: float) -> bool:
        """Returns True if it ended in time; with it everything in its pid namespace."""
        if self.poll() is not None:
            return True
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(self._pidfd, ended.set)
        try:
            async with asyncio.timeout(deadline_s):
                await ended.wait()
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(self._pidfd)
        return True

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


class ForkedBox(ProcessBox):
    """A box whose first process is a fork of the zygote."""

    def __init__(self, driver: ForkedProcess, stderr: IO[bytes], cgroup: Cgroup | None) -> None:
        super().__init__(driver, stderr, cgroup)
        self._driver = driver

    @classmethod
    async def fork(cls, zygote: Zygote, uid: int | None, cgroup: Cgroup | None) -> ForkedBox:
        """Raises `SandboxError`: it did not come up; the text has what it wrote to stderr."""
        ours, theirs = socket.socketpair()
        stderr = os.fdopen(os.memfd_create("penstock-stderr", os.MFD_CLOEXEC), "w+b", buffering=0)
        try:
            with _opened(cgroup) as groups:
                driver = await zygote.fork([theirs.fileno(), stderr.fileno(), *groups], uid)
        except BaseException as error:
            ours.close()  # ends the driver if it was forked all the same
            stderr.close()
            if cgroup is not None:
                await cls._remove(cgroup)
            if isinstance(error, OSError | TimeoutError):
                reason = str(error) or f"the zygote does not answer in {START_DEADLINE_S:.0f} s"
                raise SandboxError(f"the box cannot be started: {reason}") from error
            raise
        finally:
            theirs.close()
        box = cls(driver, stderr, cgroup)
        await box._await_ready(ours)
        return box

    async def _exited(self, deadline_s: float) -> bool:
        return await self._driver.wait(deadline_s)

    async def end(self) -> None:
        try:
            await super().end()
        finally:
            self._driver.close()


class Zygote:
    """At most one process; it starts with the first box, from the event loop's own thread (``--die-with-parent``)."""

    def __init__(self, command: BoxCommand) -> None:
        """`command`: its blobs are the byte code of the modules inside (`bundle.compile_driver`), then the box's files.

        ``{0}`` stands for the descriptor of the first blob, ``{1}`` for the socket of requests, ``{2}`` for the second
        blob, ….
        """
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._waiting: deque[asyncio.Future[ForkedProcess]] = deque()
        """Waiters in the order of their requests."""
        self._starting = asyncio.Lock()

    async def fork(self, descriptors: list[int], uid: int | None) -> ForkedProcess:
        """`descriptors`: the box's control socket, its stderr, and the file to enter each group by.

        Raises `OSError`, and `TimeoutError` past START_DEADLINE_S; the box ends by itself when its socket closes.
        """
        async with asyncio.timeout(START_DEADLINE_S):
            async with self._starting:
                channel = await self._living()
                socket.send_fds(channel, [json.dumps({"uid": uid}).encode()], descriptors)
                answer: asyncio.Future[ForkedProcess] = asyncio.get_running_loop().create_future()
                self._waiting.append(answer)
            return await answer

    async def _living(self) -> socket.socket:
        if self._process is not None and (self._channel is None or self._process.poll() is not None):
            await self.close()
        if self._channel is None:
            self._process, self._channel = _spawn(self._command)
            self._channel.setblocking(False)
            asyncio.get_running_loop().add_reader(self._channel.fileno(), self._on_answer)
        return self._channel

    def _on_answer(self) -> None:
        assert self._channel is not None
        try:
            data, descriptors, _, _ = socket.recv_fds(self._channel, _ANSWER_BYTES, 1)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        if not data:
            self._hang_up()
            return
        answer = self._waiting.popleft()
        if descriptors and not answer.done():
            answer.set_result(ForkedProcess(descriptors[0]))
        elif descriptors:
            os.close(descriptors[0])
        elif not answer.done():
            answer.set_exception(OSError(data.decode("utf-8", "replace")))

    def _hang_up(self) -> None:
        """The process is ending, or is to end: it does so when its channel closes."""
        if self._channel is not None:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._channel.close()
            self._channel = None
        while self._waiting:
            answer = self._waiting.popleft()
            if not answer.done():
                answer.set_exception(OSError("the zygote ended"))

    async def close(self) -> None:
        """Ends the process, and with it every box that it forked."""
        self._hang_up()
        process, self._process = self._process, None
        if process is None:
            return
        left_s, pauses = END_DEADLINE_S, EXIT_POLL.pauses()
        while process.poll() is None and left_s > 0:
            left_s -= await pauses.sleep()
        if process.poll() is None:
            process.kill()
            await asyncio.to_thread(process.wait, END_DEADLINE_S)


def why_no_zygote(command: BoxCommand, uid: int | None) -> str:
    """Forks one box and ends it. Returns why that cannot be done here, in words; empty if it can."""
    control, theirs = socket.socketpair()
    with control, theirs, tempfile.TemporaryFile() as stderr:
        try:
            process, channel = _spawn(command, stderr)
        except OSError as error:
            return str(error)
        try:
            channel.settimeout(START_DEADLINE_S)
            control.settimeout(START_DEADLINE_S)
            socket.send_fds(channel, [json.dumps({"uid": uid}).encode()], [theirs.fileno(), stderr.fileno()])
            theirs.close()
            data, descriptors, _, _ = socket.recv_fds(channel, _ANSWER_BYTES, 1)
            for fd in descriptors:
                os.close(fd)
            if descriptors and control.recv(64):
                return ""
            return _tail(stderr) or data.decode("utf-8", "replace").strip() or "the zygote ended"
        except OSError as error:
            return f"{_tail(stderr) or error}"
        finally:
            channel.close()
            try:
                process.wait(END_DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(END_DEADLINE_S)


def _spawn(
    command: BoxCommand, stderr: IO[bytes] | int = subprocess.DEVNULL
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The zygote, and the worker's end of its socket. It lives as long as the thread that starts it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with open_blobs(command.blobs) as blobs:
            descriptors = [*blobs[:1], theirs.fileno(), *blobs[1:]]
            return spawn(command, descriptors, subprocess.DEVNULL, stderr), ours
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()


def _tail(stderr: IO[bytes]) -> str:
    stderr.seek(0)
    return stderr.read(2000).decode("utf-8", "replace").strip()


@contextlib.contextmanager
def _opened(cgroup: Cgroup | None) -> Iterator[list[int]]:
    """Descriptors by which a process enters each of the groups. Raises `OSError`."""
    opened: list[int] = []
    try:
        for file in cgroup.join_files if cgroup is not None else ():
            opened.append(os.open(file, os.O_WRONLY | os.O_CLOEXEC))
        yield opened
    finally:
        for fd in opened:
            os.close(fd)
