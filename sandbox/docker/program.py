"""One program that the engine runs in a container (`docker exec`): bytes in, pieces of text out, its end."""

from __future__ import annotations

import asyncio
import codecs
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from penstock.sandbox.docker.container import Container
from penstock.sandbox.docker.engine import calling
from penstock.sandbox.inside.capture import Capture

if TYPE_CHECKING:
    from aiodocker.execs import Exec
    from aiodocker.stream import Stream

_FEED = 'n=$1; shift; head -c "$n" | "$@"'
"""The engine's client cannot close a program's stdin alone: the count says where it ends."""
_OUT = 1
_WRITE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Written:
    stream: Literal["stdout", "stderr"]
    text: str


class Program:
    def __init__(self, container: Container, argv: list[str], stdin: bytes, cwd: str | None, output_bytes: int) -> None:
        self.capture = Capture(output_bytes)
        self.exit_code: int | None = None
        """None while it runs, and where a limit ended it."""
        self.limit: str | None = None
        self.duration_s = 0.0
        self._container = container
        self._argv = ["sh", "-c", _FEED, "sh", str(len(stdin)), *argv] if stdin else argv
        self._stdin = stdin
        self._cwd = cwd
        self._decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in ("stdout", "stderr")}

    async def run(self, timeout_s: float) -> AsyncIterator[Written]:
        """What it writes, until it ends or breaks a limit: `limit` is set then, and it may still run.

        Raises:
            SandboxError: the engine failed.
        """
        started = time.monotonic()
        async with calling("running a program in a box"):
            execution = await self._container.prepare(self._argv, self._cwd, with_stdin=bool(self._stdin))
            stream = execution.start()
            await stream.__aenter__()
        feeding = asyncio.create_task(self._feed(stream))
        try:
            async with aclosing(self._pieces(stream, started + timeout_s)) as pieces:
                async for written in pieces:
                    yield written
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
            await stream.close()
            self.duration_s = time.monotonic() - started
        if self.limit is None and self._container.alive:
            await self._ask_exit_code(execution)
            self.limit = "output" if self.capture.cut else None

    def texts(self) -> tuple[str, str]:
        return self.capture.texts()

    async def _feed(self, stream: Stream) -> None:
        for start in range(0, len(self._stdin), _WRITE_BYTES):
            await stream.write_in(self._stdin[start : start + _WRITE_BYTES])

    async def _pieces(self, stream: Stream, deadline: float) -> AsyncIterator[Written]:
        while True:
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    message = await stream.read_out()
            except TimeoutError:
                self.limit = "wall"
                return
            if message is None:
                return
            if (written := self._keep(message.stream, message.data)) is not None:
                yield written
            if self.capture.flooded:
                self.limit = "output"
                return

    def _keep(self, number: int, data: bytes) -> Written | None:
        name: Literal["stdout", "stderr"] = "stdout" if number == _OUT else "stderr"
        kept = self.capture.stdout if number == _OUT else self.capture.stderr
        text = self._decoders[name].decode(self.capture.keep(kept, data))
        return Written(name, text) if text else None

    async def _ask_exit_code(self, execution: Exec) -> None:
        """The engine notes it a moment after the last output."""
        async with calling("asking how a program ended"):
            while (told := await execution.inspect())["Running"]:  # noqa: ASYNC110 - only the engine knows when
                await asyncio.sleep(0.01)
        self.exit_code = told["ExitCode"]
