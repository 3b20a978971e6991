"""Streamed runs: the run belongs to its session, the HTTP answer only listens.

    session.stream ─► task of the relay (to the run's own end) ─► queue ─► lines of the answer (may be cut off)

A reader that leaves does not stop the run: whoever attaches next finds the session as if `run` had been called.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from penstock.sandbox.protocol import Output, SandboxError, SandboxLost
from penstock.sandbox.server.views import StreamedOutput, StreamEnd, StreamError

Lines = asyncio.Queue[bytes | None]


class Relays:
    """The runs in progress; `stop` cancels them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def open(self, run: Callable[[Lines], Awaitable[None]]) -> AsyncIterator[bytes]:
        """JSON lines of `run`, once its first one is there.

        Raises what `run` raises before its first line: the answer has no status yet and can still be a refusal.
        """
        lines: Lines = asyncio.Queue()
        task = asyncio.ensure_future(run(lines))
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._ended(task, lines))
        first = await lines.get()
        if first is None:
            await task
        return _all(first, lines)

    def _ended(self, task: asyncio.Task[None], lines: Lines) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its last line told it, or `open` raised it
        lines.put_nowait(None)


async def _all(first: bytes | None, lines: Lines) -> AsyncIterator[bytes]:
    line = first
    while line is not None:
        yield line
        line = await lines.get()


async def relay(stream: AsyncIterator[Output], lines: Lines) -> None:
    """Every piece a line; the last one tells the result, or how the sandbox failed in the middle. Raises that too."""
    begun = False
    try:
        async for piece in stream:
            lines.put_nowait(_line(piece))
            begun = True
    except SandboxError as error:
        if begun:
            failure = StreamError(message=str(error), lost=isinstance(error, SandboxLost))
            lines.put_nowait(StreamEnd(error=failure).model_dump_json(exclude_none=True).encode() + b"\n")
        raise


def _line(piece: Output) -> bytes:
    if piece.result is not None:
        return StreamEnd(result=piece.result).model_dump_json(exclude={"error"}).encode() + b"\n"
    return StreamedOutput(stream=piece.stream, data=piece.data).model_dump_json().encode() + b"\n"
