"""POST /generate, the token path: a request in, lines of tokens out.

/generate answers NDJSON. Its status waits for the first chunk, `KEEPALIVE_S` at most: an error before that is a status,
a later one the last line ``{"error": …}``. An empty line every `KEEPALIVE_S` shows that the server is alive.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from pydantic_core import to_json
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from penstock.common import (
    cancel_and_wait,
    context_of,
    error_response,
    start_span,
)
from penstock.rollout_server.protocol import (
    BadRequest,
    Chunk,
    EngineError,
    GenerateRequest,
    VersionsDisproved,
    versions_of,
)
from penstock.rollout_server.server.request_queue import DeadlineExceeded, NotServing, QueueFull, TooOld

KEEPALIVE_S = 5.0


def refusal(error: Exception) -> JSONResponse:
    """The response to a request that failed with `error`."""
    match error:
        case BadRequest():
            return error_response(422, error.field, str(error))
        case TooOld():
            return error_response(409, "min_version", str(error))
        case DeadlineExceeded():
            return error_response(504, "deadline_s", str(error))
        case NotServing():
            return error_response(503, "", str(error), retry_after_s=1)
        case QueueFull():
            return error_response(429, "", str(error), retry_after_s=1)
        case EngineError():
            return error_response(502, "", str(error))
        case _:
            raise error


REFUSED = (NotServing, QueueFull, TooOld, BadRequest, EngineError)


# the answer --------------------------------------------------------------------------------------------------------
class GenerateResponse(Response):
    """Streams `chunks`; closes them when it ends or the client disconnects, so that the engine stops as well."""

    media_type = "application/x-ndjson"

    def __init__(self, chunks: AsyncGenerator[Chunk]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._chunks = chunks
        self._started = self._ended = False
        self._sending = asyncio.Lock()
        self._sent_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._beating: list[asyncio.Task[None]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._sent_at = time.monotonic()
        self._keep_alive(send)
        try:
            async with _DisconnectScope(receive), aclosing(self._chunks):
                last = False
                while not last:
                    chunk = await anext(self._chunks, None)
                    last = chunk is None or chunk.finish_reason is not None
                    await self._send(send, chunk_line(chunk) if chunk else b"", last=last)
        except (DeadlineExceeded, EngineError) as error:
            if self._started:
                await self._send(send, error_line(error), last=True)
            else:
                self._ended = True  # by another response
                await refusal(error)(scope, receive, send)
        finally:
            self._ended = True
            if self._timer is not None:
                self._timer.cancel()
            if self._beating:
                await cancel_and_wait(self._beating)

    async def _send(self, send: Send, line: bytes, *, last: bool = False) -> None:
        async with self._sending:  # the sign of life waits for a line under way, and the other way round
            if self._ended:
                return
            self._ended, self._sent_at = last, time.monotonic()
            if not self._started:
                self._started = True
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": line, "more_body": not last})

    def _keep_alive(self, send: Send) -> None:
        """Sends a sign of life when nothing was sent for `KEEPALIVE_S`. One timer per answer: most end before it."""
        silence_left_s = self._sent_at + KEEPALIVE_S - time.monotonic()
        if silence_left_s <= 0:
            if not self._ended and all(beat.done() for beat in self._beating):
                self._beating = [asyncio.ensure_future(self._send(send, b"\n"))]
            silence_left_s = KEEPALIVE_S
        self._timer = asyncio.get_running_loop().call_later(max(silence_left_s, 0.0), self._keep_alive, send)


class _DisconnectScope:
    """Ends its block when the client disconnects, as `asyncio.timeout` does when time is up, but without an error."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = self._left = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        self._watch = asyncio.ensure_future(self._until_disconnected())
        self._watch.add_done_callback(self._on_gone)

    async def _until_disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _on_gone(self, watch: asyncio.Future[None]) -> None:
        if not self._left and not watch.cancelled():
            self._gone = True
            self._task.cancel()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self._left = True
        await cancel_and_wait([self._watch])
        ours = self._gone and self._task.uncancel() <= self._cancelling
        return ours and kind is not None and issubclass(kind, asyncio.CancelledError)


def chunk_line(chunk: Chunk) -> bytes:
    """One line of the answer."""
    # A field at a time: `model_dump_json` would read every number again. Any JSON reader gets the same doubles back.
    fields = {
        "token_ids": chunk.token_ids,
        "logprobs": chunk.logprobs,
        "version_spans": chunk.version_spans,
        "finish_reason": chunk.finish_reason,
    }
    if chunk.routed_experts:
        fields["routed_experts"] = chunk.routed_experts
    return to_json(fields) + b"\n"


def error_line(error: Exception) -> bytes:
    """The last line of an answer that broke off."""
    field = ""
    if isinstance(error, DeadlineExceeded):
        field = "deadline_s"
    elif isinstance(error, VersionsDisproved):
        field = "version_spans"
    return to_json({"error": {"field": field, "message": str(error)}}) + b"\n"


async def traced(
    chunks: AsyncGenerator[Chunk], request: GenerateRequest, traceparent: str | None, server: str
) -> AsyncGenerator[Chunk]:
    """`chunks`, inside a server span under the caller's."""
    usage = {"operation": "text_completion", "input_tokens": len(request.token_ids)}
    facts = {**usage, "episode": request.episode_id or None, "server_name": server}
    span = start_span("sample", context_of(traceparent), facts, server=True)
    tokens, versions, reason = 0, set[int](), "broken"
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                tokens += len(chunk.token_ids)
                versions |= {version for version, _, _ in chunk.version_spans}
                reason = chunk.finish_reason or reason
                yield chunk
    except Exception as error:
        span.fail(f"{type(error).__name__}: {error}")
        raise
    finally:
        span.note(output_tokens=tokens, finish_reason=reason, **versions_of(versions))
        span.end()
