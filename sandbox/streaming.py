"""From a call that tells pieces of output to the async iterator of `Session.stream`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from penstock.sandbox.protocol import Output, RunResult

Tell = Callable[[str, str], None]


async def stream_of(call: Callable[[Tell], Awaitable[RunResult]]) -> AsyncIterator[Output]:
    """Pieces as `call` tells them, its result last. The queue between is bounded by what a run may write."""
    pieces: asyncio.Queue[Output | None] = asyncio.Queue()

    def tell(stream: str, text: str) -> None:
        pieces.put_nowait(Output("stderr" if stream == "stderr" else "stdout", text))

    task = asyncio.ensure_future(call(tell))
    task.add_done_callback(lambda _: pieces.put_nowait(None))
    try:
        while (piece := await pieces.get()) is not None:
            yield piece
        yield Output("stdout", "", await task)
    finally:
        task.cancel()  # the reader left early
        await asyncio.gather(task, return_exceptions=True)
