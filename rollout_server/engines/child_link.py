"""A child process of our own Python and the one connection to it, an inherited socket pair: JSON lines both ways.

    call    one message, one reply of the same number
    stream  a queue per request, filled by `tokens` messages

No other process can reach the child, and the connection's end is its owner's death. The connection ends with the child
too, and every waiting call gets the cause.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from pydantic_core import from_json, to_json

import penstock
from penstock.common import environment_without_secrets
from penstock.rollout_server.engines.child import Child
from penstock.rollout_server.protocol import Chunk, EngineError, EngineInfo

LINE_LIMIT_BYTES = 256 << 20
STOP_S = 5.0
"""Between telling a child to end and killing it."""


class Link:
    """One connection. `reap` waits a moment for the process's end, after which `cause` says how it ended."""

    def __init__(self, reap: Callable[[], Awaitable[None]], cause: Callable[[], str], name: str) -> None:
        """`name`: of the process, in messages."""
        self._reap, self._cause, self._name = reap, cause, name
        self.is_open = False
        self._numbers = itertools.count()
        self._streams: dict[str, asyncio.Queue[Chunk | EngineError]] = {}
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        """The engine's properties once it is up; an `EngineError` if it ended."""
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def open(self, connection: socket.socket) -> None:
        reader, self._writer = await asyncio.open_connection(sock=connection, limit=LINE_LIMIT_BYTES)
        self.is_open = True
        self._reading = asyncio.create_task(self._read(reader))

    def send(self, op: str, **fields: Any) -> None:
        """Raises `EngineError` if it would have no effect."""
        if self._writer is None or not self.is_open:
            raise EngineError(self._cause())
        self._writer.write(to_json({"op": op, **fields}) + b"\n")

    async def call(self, op: str, timeout_s: float, **fields: Any) -> dict[str, Any]:
        """Returns the reply. Raises `EngineError` if none arrives in time."""
        number = next(self._numbers)
        reply = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self.send(op, call=number, **fields)
            async with asyncio.timeout(timeout_s):
                return await reply
        except TimeoutError as error:
            raise EngineError(f"{self._name} did not answer {op!r} in {timeout_s:g} s") from error
        finally:
            del self._calls[number]

    def stream(self) -> tuple[str, asyncio.Queue[Chunk | EngineError]]:
        """A name for a request, and where its answer will arrive."""
        name = str(next(self._numbers))
        answer = self._streams[name] = asyncio.Queue()
        return name, answer

    def forget(self, name: str) -> bool:
        """Drops the request; returns True if it was still being answered."""
        return self._streams.pop(name, None) is not None

    def close_writing(self) -> None:
        """The engine takes it as its owner's end, and ends."""
        if self._writer is not None:
            self._writer.close()

    def close(self) -> None:
        """Wake everybody who still waits."""
        if self._reading is not None:
            self._reading.cancel()
        self._fail_all()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                message = from_json(line)
                match message["event"]:
                    case "tokens":
                        for name, chunk in message["answers"]:
                            self._deliver(name, Chunk.model_construct(**chunk))
                        for name, error in message["errors"]:
                            self._deliver(name, EngineError(f"{self._name} failed this request: {error}"))
                    case "ready" if not self.ready.done():
                        self.ready.set_result(EngineInfo(**message["info"]))
                    case "reply":
                        call = self._calls.get(message["call"])
                        if call is not None and not call.done():
                            call.set_result(message)
        except (OSError, ValueError):
            pass  # a dead engine, like one that closed the connection: it was reset, or a message was cut short
        finally:
            self.is_open = False
        await self._reap()
        self._fail_all()

    def _deliver(self, name: str, item: Chunk | EngineError) -> None:
        answer = self._streams.get(name)
        if answer is None:
            return
        if isinstance(item, EngineError) or item.finish_reason:
            del self._streams[name]
        answer.put_nowait(item)

    def _fail_all(self) -> None:
        cause = EngineError(self._cause())
        for answer in self._streams.values():
            answer.put_nowait(cause)
        self._streams.clear()
        futures: list[asyncio.Future[Any]] = [self.ready, *self._calls.values()]
        for waiting in futures:
            if not waiting.done():
                waiting.set_exception(cause)
                waiting.exception()  # retrieved, so that asyncio logs nothing


class LinkedChild(Child):
    """A child that runs a module of ours with this very Python. `open` comes first, `stop` last."""

    def __init__(self, name: str, log_path: Path, title: str, threads: int) -> None:
        """`title`: the process, in messages."""
        super().__init__(name, log_path)
        self.title, self._threads = title, threads
        self.link: Link | None = None

    @property
    def is_linked(self) -> bool:
        """The process runs and its connection is open."""
        return self.alive and self.link is not None and self.link.is_open

    async def open(self, module: str, *arguments: str) -> Link:
        """Starts ``python -m MODULE --fd N ARGUMENTS``."""
        self.link = link = Link(self._reap, self._exit_reason, self.title)
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", module, "--fd", str(theirs.fileno()), *arguments]
        with theirs:
            await self.spawn(command, child_environment(self._threads), pass_fds=[theirs.fileno()])
        await link.open(ours)
        return link

    async def call(self, op: str, timeout_s: float, **fields: Any) -> dict[str, Any]:
        if self.link is None:
            raise EngineError(f"{self.title} is not started")
        return await self.link.call(op, timeout_s, **fields)

    async def stop(self) -> None:
        """Closes its connection, and kills it after `STOP_S`; a second call does nothing."""
        if self.link is not None:
            self.link.close_writing()
        if self.process is not None and self.process.returncode is None:
            try:
                async with asyncio.timeout(STOP_S):
                    await self.process.wait()
            except TimeoutError:
                self.process.kill()
                await self.process.wait()
        if self.link is not None:
            self.link.close()

    async def _reap(self) -> None:
        if self.process is not None:
            # The process ends within a second of its connection.
            await asyncio.wait({asyncio.ensure_future(self.process.wait())}, timeout=1.0)

    def _exit_reason(self) -> str:
        tail = self.tail()
        return f"{self.title} is gone" + (f"; the end of {self.log_path}:\n{tail}" if tail else "")


def child_environment(threads: int) -> dict[str, str]:
    """Environment of a child that runs this very Python: its packages, no secret, `threads` threads."""
    root = str(Path(penstock.__file__).parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **environment_without_secrets(),
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
