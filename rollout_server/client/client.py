"""The agent worker's client: asks a server, continues at another one where the answer breaks off, until the deadline.

    stream:   pick a server ──► POST /generate ──► chunks, to the last one
                   ▲                  │ server gone, draining, full, too old, aborted: keep the tokens, back off
                   └──────────────────┘

Imports neither torch nor transformers.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Literal, TypeVar

import aiohttp
from pydantic_core import from_json

from penstock.common import Backoff, bearer_headers, cancel_and_wait, current_context, trace_headers
from penstock.rollout_server.client.answer_builder import AnswerBuilder
from penstock.rollout_server.client.routing import PendingRequest, Registry, Router
from penstock.rollout_server.protocol import (
    BadRequest,
    Chunk,
    EngineError,
    GenerateRequest,
    Generation,
    VersionsDisproved,
)
from penstock.transfer_queue import QueueError, ServerInfo

CONNECT_S = 5.0
SILENCE_S = 20.0
"""Longest silence of a live server, which sends a line every 5 s."""
BACKOFF = Backoff(0.05, 0.5, jitter=(0.5, 1.5))
LINE_LIMIT_BYTES = 256 << 20
"""A line may have the routed experts of a whole prompt: of 128,000 tokens up to 160 MB, as base64."""
MOST_ASLEEP_S = 3600.0
"""Turns of the trainer do not count as time of an answer, for this long."""
Blame = Literal["nobody", "answer", "full", "gone"]
"""Cause of an answer that broke off: none of the server's, this answer, a long queue, or an unreachable server."""
BLAMES: dict[int, Blame] = {408: "nobody", 409: "nobody", 429: "full", 503: "gone", 504: "nobody"}
STRANGERS = (401, 404, 405)
"""Answers of no server of this run: another program has the address of one that was killed."""
STRANGER_S = 30.0
"""The registry forgets a server sooner: one that answers so for longer is the run's own, and refuses its token."""
T = TypeVar("T")


class RolloutClient:
    """`GenerateClient` over HTTP. One per process, for any number of concurrent episodes."""

    def __init__(
        self,
        queue: Registry,
        token: str,
        timeout_s: float = 120.0,
        home: str | None = None,
        *,
        hedge_after_s: float = 0.0,
    ) -> None:
        """Args:
        home: URL of the server that gets new episodes while it is available; None: the least loaded server.
        hedge_after_s: silence before the first token after which a second server is asked as well; 0: never.
        """
        self.timeout_s, self.hedge_after_s = timeout_s, hedge_after_s
        self.refused = 0
        """Requests that a server refused because its queue was full (429)."""
        self._router = Router(queue, home)
        self._headers = {**bearer_headers(token), "Content-Type": "application/json"}
        self._session: aiohttp.ClientSession | None = None

    async def generate(self, request: GenerateRequest) -> Generation:
        """Returns the whole answer, over server failures. Raises as `stream` does."""
        # A hedge is decided by the first tokens.
        answer = AnswerBuilder(request if self.hedge_after_s > 0 else request.model_copy(update={"whole": True}))
        async with aclosing(self._stream(answer)) as chunks:
            async for _ in chunks:
                pass
        return answer.build()

    def stream(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        """Streams the answer, over server failures; no token is repeated.

        `version_spans` count from the start of each chunk; the last chunk, and no other, has a `finish_reason`, which
        is never ``abort``. Closing the generator early aborts the request in the engine.

        Raises:
            VersionsDisproved: a server disproved the versions of tokens that were handed on; drop the whole answer.
            EngineError: not retryable where the request is invalid; retryable, with the last cause, where `timeout_s`
                or the request's `deadline_s` expired.
        """
        return self._stream(AnswerBuilder(request), may_take_back=False)

    async def _stream(self, answer: AnswerBuilder, *, may_take_back: bool = True) -> AsyncGenerator[Chunk]:
        """`may_take_back`: the reader keeps no chunk, so that disproved tokens may be sampled again."""
        timeout_s = min(self.timeout_s, answer.request.deadline_s or self.timeout_s)
        deadline, asleep_until = time.monotonic() + timeout_s, time.monotonic() + MOST_ASLEEP_S
        cause, avoid, failures, refusals = "", "", 0, _Refusals()
        while answer.finish_reason is None:
            if time.monotonic() >= deadline:
                raise EngineError(f"no whole answer in {timeout_s:g} s ({len(answer.token_ids)} tokens): {cause}")
            began = time.monotonic()
            try:
                async with aclosing(self._attempt(answer, deadline, avoid)) as chunks:
                    async for chunk in chunks:
                        failures, refusals = 0, _Refusals()
                        yield chunk
            except TimeoutError:
                cause = cause or "the servers were too slow"
            except QueueError as error:
                cause, failures = str(error), failures + 1
            except _Broken as error:
                cause, failures = str(error), failures + 1
                avoid = error.url if error.blame != "nobody" else ""
                refusals.note(error, began)
                if error.disproved and answer.take_back() and not may_take_back:
                    raise VersionsDisproved(cause) from error
            if answer.finish_reason is None and answer.finish_by_content():
                yield Chunk(finish_reason=answer.finish_reason)
                return
            if failures:
                await asyncio.sleep(min(BACKOFF.pause_s(failures), max(0.0, deadline - time.monotonic())))
            deadline += self._slept_s(answer.request, began, asleep_until)

    def _slept_s(self, request: GenerateRequest, began: float, until: float) -> float:
        """Since `began`, where no server could answer for want of its devices, which the trainer has: no time of an
        answer, unless the request has a deadline of its own. At most `until`."""
        asleep = request.deadline_s is None and began < until and self._router.asleep(request.split)
        return time.monotonic() - began if asleep else 0.0

    async def _attempt(self, answer: AnswerBuilder, deadline: float, avoid: str) -> AsyncGenerator[Chunk]:
        """Adds what one server, or the faster of two, streams. Raises `_Broken`, `QueueError`, `TimeoutError`.

        The deadline holds for each wait; the time a reader takes between two chunks is not cut off.
        """
        request = answer.next_request(max(deadline - time.monotonic(), 0.001))
        async with _until(deadline):
            server = await self._pick(request, avoid)
        if server is None:
            raise _Broken(self._no_server(request.min_version), "nobody")
        chunks = self._post(server, request)
        if self.hedge_after_s > 0:
            chunks = hedge(chunks, self.hedge_after_s, partial(self._second, server, request))
        async with aclosing(chunks):
            while answer.finish_reason is None:
                async with _until(deadline):
                    chunk = await anext(chunks, None)
                if chunk is None:
                    return
                if (added := answer.add(chunk)) is not None:
                    yield added

    async def _pick(self, request: GenerateRequest, avoid: str) -> ServerInfo | None:
        return await self._router.pick(
            request.episode_id,
            request.min_version,
            (avoid,),
            request.split,
            prefix=request.prefix,
            tokens=tokens_of(request),
        )

    async def _second(self, first: ServerInfo, request: GenerateRequest) -> AsyncGenerator[Chunk] | None:
        """The same request to another server, where there is one."""
        server = await self._pick(request, first.url)
        # The first server may still win; the episode sticks to whichever answers first.
        self._router.stick(request.episode_id, first.url)
        return None if server is None or server.url == first.url else self._post(server, request)

    async def _post(self, server: ServerInfo, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        """Streams one server's chunks and reports its result to the router. No await before `begin`: see there."""
        pending = self._router.begin(server.url, tokens_of(request), sticky=bool(request.episode_id))
        body = request.model_dump_json().encode()
        headers = {**self._headers, **trace_headers(current_context())}
        try:
            async with self._http().post(f"{server.url}/generate", data=body, headers=headers) as response:
                if response.status != 200:
                    raise await _refusal(response)
                async for line in response.content:
                    if not line.strip():  # keep-alive
                        continue
                    chunk = _parse(line)
                    self._router.first_tokens(pending)
                    self._router.stick(request.episode_id, server.url)
                    if chunk.finish_reason in ("stop", "length"):
                        self._router.succeeded(pending)
                    yield chunk
                    if chunk.finish_reason == "abort":
                        raise _Broken("the engine aborted the answer", "nobody")
            raise _Broken("the answer broke off", "gone")
        except (aiohttp.ClientError, TimeoutError, _Broken) as error:
            raise self._broken(server, pending, error) from error
        finally:
            self._router.end(pending)

    def _broken(self, server: ServerInfo, pending: PendingRequest, error: Exception) -> _Broken:
        """Reports the failure to the router, and names the server in the error."""
        cause = f"{server.server_id} at {server.url}: {error or type(error).__name__}"
        known = error if isinstance(error, _Broken) else _Broken("", "gone")
        broken = _Broken(cause, known.blame, url=server.url, disproved=known.disproved, refused=known.refused)
        if known.blame == "full":
            self.refused += 1
            self._router.full(pending, known.retry_after_s)
        elif known.blame != "nobody":
            self._router.failed(pending, cause, gone=known.blame == "gone")
        return broken

    def _no_server(self, min_version: int) -> str:
        states = self._router.describe()
        if not states:
            return "no rollout server is registered"
        return f"no rollout server takes requests at version {min_version} or newer ({states})"

    async def best_version(self) -> int | None:
        """Newest policy version among live servers that accept training requests; None: there are none."""
        servers = await self._router.servers()
        return max((s.version for s in servers if s.accepting and not s.evaluates), default=None)

    async def servers(self) -> Sequence[ServerInfo]:
        """Newest heartbeats. Raises `QueueError`."""
        return await self._router.servers()

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            # Made on first use: a session belongs to the event loop that runs then.
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=timeout, read_bufsize=LINE_LIMIT_BYTES, trust_env=False
            )
        return self._session


def tokens_of(request: GenerateRequest) -> int:
    """Prompt and expected answer: what it counts for at a server."""
    return len(request.token_ids) + request.sampling.max_new_tokens


def _until(deadline: float) -> asyncio.Timeout:
    return asyncio.timeout(deadline - time.monotonic())


# HTTP --------------------------------------------------------------------------------------------------------------
class _Broken(Exception):
    """The answer does not continue at this server; another one may have it. `blame` is what the router learns."""

    def __init__(
        self,
        message: str,
        blame: Blame = "answer",
        retry_after_s: float = 1.0,
        url: str = "",
        *,
        disproved: bool = False,
        refused: bool = False,
    ) -> None:
        super().__init__(message)
        self.blame, self.retry_after_s, self.url = blame, retry_after_s, url
        self.disproved, self.refused = disproved, refused


class _Refusals:
    """Of one answer, since its last tokens."""

    def __init__(self) -> None:
        self._since = float("inf")

    def note(self, error: _Broken, began: float) -> None:
        """`began`: the attempt. Raises `EngineError`, not retryable, after more than a stranger could have caused."""
        if error.refused:
            self._since = min(self._since, began)
            if time.monotonic() - self._since > STRANGER_S:
                raise EngineError(f"refused for {STRANGER_S:g} s: {error}", retryable=False) from error


async def _refusal(response: aiohttp.ClientResponse) -> Exception:
    """Converts a status other than 200. A 4xx that every server would give is final."""
    text, status = (await response.text())[:2000], response.status
    try:
        error = json.loads(text)["error"]
        message, field = error["message"], error.get("field")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, field = text, None
    if status == 422 and field:
        return BadRequest(field, message.removeprefix(f"{field}: "))
    if status in STRANGERS:
        return _Broken(f"{status}: {message}", "gone", refused=True)
    if 400 <= status < 500 and status not in BLAMES:
        return EngineError(f"the rollout server refused ({status}): {message}", retryable=False)
    retry_after = response.headers.get("Retry-After", "")
    return _Broken(
        f"{status}: {message}", BLAMES.get(status, "answer"), float(retry_after) if retry_after.isdigit() else 1.0
    )


def _parse(line: bytes) -> Chunk:
    try:
        value = from_json(line)
    except ValueError as error:
        raise _Broken(f"half a line: {line[:80]!r}") from error
    if "error" in value:
        error_detail = value["error"]
        field = error_detail.get("field")
        blame: Blame = "nobody" if field == "deadline_s" else "answer"
        raise _Broken(error_detail["message"], blame, disproved=field == "version_spans")
    value["version_spans"] = [tuple(span) for span in value["version_spans"]]
    return Chunk.model_construct(**value)


# hedging -----------------------------------------------------------------------------------------------------------
class EmptyStream(Exception):
    """A stream ended before its first item."""


async def hedge(
    first: AsyncGenerator[T], after_s: float, second: Callable[[], Awaitable[AsyncGenerator[T] | None]]
) -> AsyncGenerator[T]:
    """Streams `first`, or the stream that `second` opens where `first` is silent for `after_s`.

    The stream that yields first is read to its end, the other one is closed. A stream that fails before its first item
    loses; where both fail, the error of the last one is raised.
    """
    streams = [first]
    tasks: list[asyncio.Task[T]] = []
    try:
        tasks.append(asyncio.ensure_future(_first_item(first)))
        await asyncio.wait(tasks, timeout=after_s)
        if not tasks[0].done() and (other := await second()) is not None:
            streams.append(other)
            tasks.append(asyncio.ensure_future(_first_item(other)))
        winner = await _winner(tasks)
        await cancel_and_wait([task for task in tasks if task is not tasks[winner]])
        await _close([stream for stream in streams if stream is not streams[winner]])
        yield tasks[winner].result()
        async for item in streams[winner]:
            yield item
    finally:
        await cancel_and_wait(tasks)
        await _close(streams)


async def _first_item(items: AsyncGenerator[T]) -> T:
    try:
        return await anext(items)
    except StopAsyncIteration:
        raise EmptyStream from None


async def _winner(tasks: list[asyncio.Task[T]]) -> int:
    """Index of the first task that succeeded, or of the last one that failed."""
    waiting = set(tasks)
    last: asyncio.Task[T] = tasks[0]
    while waiting:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task in done:
                last = task
                if task.exception() is None:
                    return tasks.index(task)
    return tasks.index(last)


async def _close(streams: list[AsyncGenerator[T]]) -> None:
    for stream in streams:
        await stream.aclose()
