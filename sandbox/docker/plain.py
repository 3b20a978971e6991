"""Sessions of images without a fit python3: every call is a program execution of the engine's, nothing lives on.

What is lost against a driver: `run_python`, a shell that keeps its state, and some 60 ms per call. What is kept: the
walls, limits told by the same names, files. A limit that ends a run ends all that runs in the box with it.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

from penstock.sandbox.config import SandboxConfig
from penstock.sandbox.docker.container import Container
from penstock.sandbox.docker.program import Program
from penstock.sandbox.inside.confine import OOM_COUNTERS
from penstock.sandbox.protocol import Output, RunResult, SandboxError, SandboxLost

PLAIN_COMMAND = ["sh", "-c", "while read -r line; do :; done"]
"""First process of such a box: ends when its stdin does. As pid 1 it cannot be ended from inside."""
NO_PYTHON = "this image has no python3 of 3.9 or newer: use one that has (`python:3.12-slim`), or commands alone"
NO_SHELL = "a shell that keeps its directory and variables needs a python3 of 3.9 or newer in the image; use `run`"
FILE_DEADLINE_S = 20.0
MAX_FILE_BYTES = 32 << 20
_SIGXCPU = 128 + 24
_KILL_ALL = ["sh", "-c", "kill -9 -1"]
_WRITE = ["sh", "-c", '[ ! -e "$1" ] || [ -f "$1" ] || { echo "not a regular file" >&2; exit 1; }; cat >"$1"', "sh"]
_READ = [
    "sh",
    "-c",
    '[ ! -e "$2" ] || [ -f "$2" ] || { echo "not a regular file" >&2; exit 1; }; head -c "$1" <"$2"',
    "sh",
]
_ERRORS = (errno.ENOENT, errno.EACCES, errno.EROFS, errno.EISDIR, errno.ENOSPC, errno.ENAMETOOLONG, errno.ENOTDIR)


class PlainSession:
    """As `DriverSession` in what it promises, but for `run_python` and `run_shell`, which are errors."""

    def __init__(
        self,
        session_id: str,
        config: SandboxConfig,
        launch: Callable[[], Awaitable[Container]],
        on_closed: Callable[[], None],
    ) -> None:
        self.session_id = session_id
        self._config = config
        self._launch = launch
        self._on_closed = on_closed
        self._container: Container | None = None
        self._oom_kills = 0
        self._turn = asyncio.Lock()
        self._closing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        self._container = await self._launch()

    async def run(
        self, argv: list[str], *, stdin: str = "", timeout_s: float | None = None, cwd: str | None = None
    ) -> RunResult:
        last = None
        async with aclosing(self.stream(argv, stdin=stdin, timeout_s=timeout_s, cwd=cwd)) as outputs:
            async for output in outputs:
                last = output.result
        assert last is not None
        return last

    async def stream(
        self, argv: list[str], *, stdin: str = "", timeout_s: float | None = None, cwd: str | None = None
    ) -> AsyncIterator[Output]:
        limit_s = self._config.run_timeout_s if timeout_s is None else timeout_s
        async with self._turn:
            container = await self._living()
            program = Program(container, argv, stdin.encode("utf-8", "replace"), cwd, self._config.output_bytes)
            try:
                async for written in program.run(limit_s):
                    yield Output(written.stream, written.text)
            except BaseException:  # a caller that left, or an engine that broke: what still runs must not run on
                await self._end_box()
                raise
            yield Output("stdout", "", await self._result(container, program))

    async def run_python(self, code: str, *, timeout_s: float | None = None) -> RunResult:
        raise SandboxError(NO_PYTHON)

    async def run_shell(self, command: str, *, timeout_s: float | None = None) -> RunResult:
        raise SandboxError(NO_SHELL)

    async def write_file(self, path: str, data: bytes) -> None:
        if len(data) > MAX_FILE_BYTES:
            raise OSError(errno.EFBIG, f"more than {MAX_FILE_BYTES} bytes in one file", path)
        await self._file([*_WRITE, _absolute(path)], data, path)

    async def read_file(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        wanted = min(max_bytes, MAX_FILE_BYTES)
        return await self._file([*_READ, str(wanted), _absolute(path)], b"", path)

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._shut_down())
        await asyncio.shield(self._closing)

    async def _shut_down(self) -> None:
        try:
            await self._end_box()
        finally:
            self._on_closed()

    async def _living(self) -> Container:
        if self._closing is not None:
            raise SandboxLost(f"session {self.session_id} is closed")
        if self._container is None:
            self._container = await self._launch()
            self._oom_kills = 0
        if not self._container.alive:
            await self.close()
            raise SandboxLost(f"the box of session {self.session_id} ended between two calls")
        return self._container

    async def _end_box(self) -> None:
        container, self._container = self._container, None
        if container is not None:
            await asyncio.shield(asyncio.create_task(container.remove()))

    async def _result(self, container: Container, program: Program) -> RunResult:
        exit_code, limit, lost = program.exit_code, program.limit, False
        if not container.alive:
            lost, exit_code = True, None
            limit = limit or ("memory" if await container.ran_out_of_memory() else None)
            if limit is None:
                await self.close()
                raise SandboxLost(f"the box of session {self.session_id} ended during a run")
            await self._end_box()
        elif exit_code is None:
            lost = not await self._kill_all(container)
        elif exit_code != 0 and await self._new_oom_kills(container):
            limit, exit_code = "memory", None if exit_code > 128 else exit_code
        elif exit_code == _SIGXCPU:
            limit, exit_code = "cpu", None
        stdout, stderr = program.texts()
        if exit_code is not None and exit_code > 128:
            exit_code = 128 - exit_code  # as a signal is told everywhere else
        return RunResult(stdout, stderr, exit_code, limit, program.duration_s, lost)

    async def _kill_all(self, container: Container) -> bool:
        """All processes but the first; where the box is too full even for that, all of it. False then."""
        killer = Program(container, _KILL_ALL, b"", None, 1024)
        try:
            async for _ in killer.run(FILE_DEADLINE_S):
                continue
        except SandboxError:
            killer.exit_code = 1
        if killer.exit_code in (0, 137):  # the shell may count itself among them
            return True
        await self._end_box()
        return False

    async def _new_oom_kills(self, container: Container) -> bool:
        program = Program(container, ["sh", "-c", f"cat {' '.join(OOM_COUNTERS)} 2>/dev/null"], b"", None, 4096)
        async for _ in program.run(FILE_DEADLINE_S):
            continue
        lines = program.texts()[0].splitlines()
        before, self._oom_kills = self._oom_kills, sum(int(x.split()[1]) for x in lines if x.startswith("oom_kill "))
        return self._oom_kills > before

    async def _file(self, argv: list[str], data: bytes, path: str) -> bytes:
        if "\0" in path:
            raise FileNotFoundError(errno.ENOENT, "path holds a NUL", path.replace("\0", "\\0"))
        async with self._turn:
            program = Program(await self._living(), argv, data, None, 2 * MAX_FILE_BYTES)
            async for _ in program.run(FILE_DEADLINE_S):
                continue
        if program.exit_code is None:
            await self._end_box()
            raise SandboxError(f"no answer to a file command in {FILE_DEADLINE_S:.0f} s")
        if program.exit_code != 0:
            raise _file_error(program.texts()[1], path)
        return bytes(program.capture.stdout)


def _absolute(path: str) -> str:
    return os.path.join("/tmp", path)  # noqa: S108 - the box's own


def _file_error(text: str, path: str) -> OSError:
    """What the shell said, as the error that open() would have been."""
    for number in _ERRORS:
        if os.strerror(number).lower() in text.lower():
            return OSError(number, os.strerror(number), path)
    return PermissionError(errno.EPERM, text.strip() or "cannot be opened", path)
