"""One program that the engine runs in a container (`docker exec`): bytes in, output as it comes, its end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from penstock.sandbox.docker.container import Container
from penstock.sandbox.docker.engine import calling, translating
from penstock.sandbox.frames import Tell
from penstock.sandbox.inside.capture import Capture

if TYPE_CHECKING:
    from aiodocker.execs import Exec
    from aiodocker.stream import Stream

_LIMITED = 'ulimit -S -t "$1"; ulimit -H -t "$(($1 + 1))"; n=$2; shift 2; '
_RUN = _LIMITED + 'exec "$@"'
_RUN_FED = _LIMITED + 'head -c "$n" | "$@"'
"""The engine's client cannot close a program's stdin alone: the count says where it ends."""
_OUT = 1
_WRITE_BYTES = 1 << 16


class Program:
    """Told by `run`, once."""

    def __init__(
        self, argv: list[str], stdin: bytes = b"", *, cwd: str | None = None, cpu_s: int = 60, output_bytes: int = 4096
    ) -> None:
        self.output_bytes = output_bytes
        self.exit_code: int | None = None
        """As a shell tells it; None while it runs, and where a limit ended it or its container is gone."""
        self.limit: str | None = None
        self.duration_s = 0.0
        self._argv = ["sh", "-c", _RUN_FED if stdin else _RUN, "sh", str(cpu_s), str(len(stdin)), *argv]
        self._stdin = stdin
        self._cwd = cwd

    async def run(self, container: Container, timeout_s: float, tell: Tell | None = None) -> None:
        """Until it ends, or breaks a limit: `limit` is set then, and it may still run.

        Raises:
            SandboxError: the engine failed.
        """
        self.capture = Capture(self.output_bytes, tell)
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
            await self._ask_exit_code(execution)
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

    async def _ask_exit_code(self, execution: Exec) -> None:
        """The engine notes it a moment after the last output."""
        async with calling("asking how a program ended"):
            while (told := await execution.inspect())["Running"]:  # noqa: ASYNC110 - only the engine knows when
                await asyncio.sleep(0.01)
        self.exit_code = told["ExitCode"]
