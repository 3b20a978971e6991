"""One program that the engine runs in a container (`docker exec`): bytes in, output as it comes, its end.

Sessions of images without a fit python3: every call is a program execution of the engine's, nothing lives on.

What is lost against a driver: `run_python`, a shell that keeps its state, and some 60 ms per call. What is kept: the
walls, limits under the same names, files. A limit that ends a run ends all that runs in the box with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from penstock.sandbox.box import OnOutput
from penstock.sandbox.docker.container import Container
from penstock.sandbox.docker.engine import calling, translating
from penstock.sandbox.inside.capture import OutputCapture
from penstock.sandbox.inside.driver import OOM_COUNTERS
from penstock.sandbox.protocol import Output, RunResult, SandboxError, SandboxLost
from penstock.sandbox.session import MAX_FILE_BYTES, OneBoxSession, stream_of

if TYPE_CHECKING:
    from aiodocker.stream import Stream


_OUT = 1
_WRITE_BYTES = 1 << 16


class Program:
    """One program; `run` it once."""

    def __init__(
        self, argv: list[str], stdin: bytes = b"", *, cwd: str | None = None, cpu_s: int = 60, output_bytes: int = 4096
    ) -> None:
        self.output_bytes = output_bytes
        self.exit_code: int | None = None
        """Exit code as a shell reports it; None while the program runs, after a limit, or if the container is gone."""
        self.limit: str | None = None
        self.duration_s = 0.0
        limits = 'ulimit -S -t "$1"; ulimit -H -t "$(($1 + 1))"; n=$2; shift 2; '
        # the engine's client cannot close a program's stdin alone: the count says how long it is
        start = 'head -c "$n" | "$@"' if stdin else 'exec "$@"'
        self._argv = ["sh", "-c", limits + start, "sh", str(cpu_s), str(len(stdin)), *argv]
        self._stdin = stdin
        self._cwd = cwd

    async def run(self, container: Container, timeout_s: float, on_output: OnOutput | None = None) -> None:
        """Until it ends, or breaks a limit: `limit` is set then, and it may still run.

        Raises:
            SandboxError: the engine failed.
        """
        self.capture = OutputCapture(self.output_bytes, on_output)
        started = time.monotonic()
        async with calling("running a program in a box"):
            execution = await container.prepare(self._argv, self._cwd, with_stdin=bool(self._stdin))
            stream = execution.start()
            await stream.__aenter__()
        feeding = asyncio.create_task(self._feed(stream))
        try:
            async with asyncio.timeout(timeout_s):
                with translating("hearing what a program in a box says"):
                    self.limit = await self._read(stream)
        except TimeoutError:
            self.limit = "wall"
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
            with contextlib.suppress(AssertionError):  # aiodocker's word for a connection that is closed already
                await stream.close()
            self.capture.finish()
            self.duration_s = time.monotonic() - started
        if self.limit is None and container.alive:
            async with calling("asking how a program ended"):  # the engine notes it a moment after the last output
                while (report := await execution.inspect())["Running"]:  # noqa: ASYNC110 - only the engine knows when
                    await asyncio.sleep(0.01)
            self.exit_code = report["ExitCode"]
            self.limit = "output" if self.capture.cut else None

    async def _feed(self, stream: Stream) -> None:
        for start in range(0, len(self._stdin), _WRITE_BYTES):
            await stream.write_in(self._stdin[start : start + _WRITE_BYTES])

    async def _read(self, stream: Stream) -> str | None:
        while (message := await stream.read_out()) is not None:
            if message.stream == _OUT:
                self.capture.keep(self.capture.stdout, message.data, "stdout")
            else:
                self.capture.keep(self.capture.stderr, message.data, "stderr")
            if self.capture.flooded:
                return "output"
        return None


KEEPER_COMMAND = ["sh", "-c", "while read -r line; do jobs; done"]
"""First process of such a box. It ends when its stdin does and cannot be ended from inside; `jobs` reaps orphans."""
HOUSEKEEPING_S = 20.0


class ExecSession(OneBoxSession[Container]):
    """Keeps the promises of `DriverSession`, except that `run_python` and `run_shell` raise `SandboxError`."""

    _counted: Container | None = None
    """The container whose out-of-memory kills `_oom_kills` counts."""
    _oom_kills = 0

    async def run(
        self, argv: list[str], *, stdin: str = "", timeout_s: float | None = None, cwd: str | None = None
    ) -> RunResult:
        return await self._run(argv, stdin, timeout_s, cwd)

    def stream(
        self, argv: list[str], *, stdin: str = "", timeout_s: float | None = None, cwd: str | None = None
    ) -> AsyncIterator[Output]:
        return stream_of(lambda on_output: self._run(argv, stdin, timeout_s, cwd, on_output))

    async def run_python(self, code: str, *, timeout_s: float | None = None) -> RunResult:
        raise SandboxError(
            "this image has no python3 of 3.9 or newer: use one that has (`python:3.12-slim`), or commands alone"
        )

    async def run_shell(self, command: str, *, timeout_s: float | None = None) -> RunResult:
        raise SandboxError(
            "a shell that keeps its directory and variables needs a python3 of 3.9 or newer in the image; use `run`"
        )

    async def write_file(self, path: str, data: bytes) -> None:
        if len(data) > MAX_FILE_BYTES:
            raise OSError(errno.EFBIG, f"more than {MAX_FILE_BYTES} bytes in one file", path)
        await self._file('cat >"$1"', path, data)

    async def read_file(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        return await self._file(f'head -c {min(max_bytes, MAX_FILE_BYTES)} <"$1"', path)

    # ---- runs

    async def _run(
        self, argv: list[str], stdin: str, timeout_s: float | None, cwd: str | None, on_output: OnOutput | None = None
    ) -> RunResult:
        limits = {"cpu_s": self._config.cpu_s, "output_bytes": self._config.output_bytes}
        program = Program(argv, stdin.encode("utf-8", "replace"), cwd=cwd, **limits)
        async with self._turn:
            container = await self._living_box()
            self._state_loss.record_start("run")
            await self._do(
                program, container, self._config.run_timeout_s if timeout_s is None else timeout_s, on_output
            )
            exit_code, limit = await self._outcome(container, program)
            if container is self._box:
                await _reap(container)
        stdout, stderr = program.capture.texts()
        return self._state_loss.report("run", RunResult(stdout, stderr, exit_code, limit, program.duration_s))

    async def _do(
        self, program: Program, container: Container, timeout_s: float, on_output: OnOutput | None = None
    ) -> None:
        """Ends the box where the caller leaves or the engine fails: the program must not keep running."""
        try:
            await program.run(container, timeout_s, on_output)
        except BaseException:
            await self._end_box()
            raise

    async def _outcome(self, container: Container, program: Program) -> tuple[int | None, str | None]:
        """(exit code, limit)"""
        if not container.alive:
            limit = container.broken_limit
            if limit is None and not await container.ran_out_of_memory():
                await self.close()  # from inside, nothing but lack of memory can end the first process
                raise SandboxLost(f"the box of session {self.session_id} ended during a run")
            await self._end_box()
            return None, limit or "memory"
        code = program.exit_code
        if code is None:
            gone = False
            try:
                gone = await _all_killed(container)
            finally:  # a cancelled caller leaves nothing running either; nor does a box that is too full to kill
                if not gone:
                    await self._end_box()
        if container is self._box and await self._ran_out_of_memory(container, ask=code != 0):
            return (None if code == 128 + signal.SIGKILL else code), "memory"
        if code is None:
            return None, program.limit
        if code == 128 + signal.SIGXCPU:
            return None, "cpu"
        return (128 - code if code > 128 else code), program.limit

    async def _ran_out_of_memory(self, container: Container, ask: bool) -> bool:
        """Since the last time; where only the box itself knows it is asked, if at all, which takes another program."""
        if container is not self._counted:
            self._counted, self._oom_kills = container, 0
        total = container.oom_kills()
        if total is None:
            total = self._oom_kills
            if ask:
                counter = Program(["sh", "-c", f"cat {' '.join(OOM_COUNTERS)} 2>/dev/null"])
                await self._do(counter, container, HOUSEKEEPING_S)
                lines = counter.capture.texts()[0].splitlines()
                total = sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
        before, self._oom_kills = self._oom_kills, total
        return total > before

    async def _file(self, script: str, path: str, data: bytes = b"") -> bytes:
        """Returns the output of `script` on a regular file, ``$1``. Raises `SandboxError`, `OSError`."""
        if "\0" in path:
            raise FileNotFoundError(errno.ENOENT, "path holds a NUL", path.replace("\0", "\\0"))
        regular = '[ ! -e "$1" ] || [ -f "$1" ] || { echo "not a regular file" >&2; exit 1; }; '
        absolute = os.path.join("/tmp", path)  # noqa: S108 - the box's own
        program = Program(["sh", "-c", regular + script, "sh", absolute], data, output_bytes=2 * MAX_FILE_BYTES)
        async with self._turn:
            await self._do(program, await self._living_box(), HOUSEKEEPING_S)
            if program.exit_code is None:
                await self._end_box()
                raise SandboxError(f"no answer to a file command in {HOUSEKEEPING_S:.0f} s")
        if program.exit_code != 0:
            raise file_error(program.capture.texts()[1], path)
        return bytes(program.capture.stdout)


async def _all_killed(container: Container) -> bool:
    """A signal is sent before it is acted on: what was killed could still write a file while the next call runs."""
    for pause_s in (0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0):
        await asyncio.sleep(pause_s)
        # ends with 0 if only the first process and this one are left; killed ones are listed until they are reaped
        killer = Program(["sh", "-c", "kill -9 -1; set -- /proc/[0-9]*; [ $# -le 2 ]"])
        try:
            await killer.run(container, HOUSEKEEPING_S)
        except SandboxError:
            return False
        if killer.exit_code in (0, None) or not container.alive:
            return killer.exit_code == 0
        await _reap(container)
    return False


async def _reap(container: Container) -> None:
    """A line makes the first process look for children that ended: orphans are its own."""
    with contextlib.suppress(ConnectionError):  # gone by now: the next call notices
        container.write(b"\n")
        await container.drain()


def file_error(text: str, path: str) -> OSError:
    """Maps a shell's message to the error that open() would raise."""
    numbers = (
        *(errno.ENOENT, errno.EACCES, errno.EROFS, errno.EISDIR),
        *(errno.ENOSPC, errno.ENAMETOOLONG, errno.ENOTDIR),
    )
    words = {"no such file": errno.ENOENT, "nonexistent": errno.ENOENT}
    # A shell's own words last: they may be a part of the path, as in `can't open nonexistent: Permission denied`.
    for word, number in ({os.strerror(number).lower(): number for number in numbers} | words).items():
        if word in text.lower():
            return OSError(number, os.strerror(number), path)
    return PermissionError(errno.EPERM, text.strip() or "cannot be opened", path)
