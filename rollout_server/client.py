"""The agent worker's side: ask any server that can, go on elsewhere when it breaks, give up at the deadline.

    stream:    pick ──► read ───► chunks, to the last
                 ▲         │ server gone, draining, full, too old, aborted: keep the tokens, back off
                 └─────────┘

Neither torch nor transformers is imported here.

An answer as it grows, over one server or several: what is there, what is still to be asked, when it is whole.

Streams of chunks with a deadline, and two of them of which the first to speak is read on.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Literal, TypeVar

import aiohttp

from penstock.rollout_server.protocol import (
    Chunk,
    EngineError,
    FinishReason,
    GenerateRequest,
    Generation,
    Span,
    extend_spans,
)
from penstock.rollout_server.routing import Registry, Router, Sent
from penstock.rollout_server.tracing import carrier, here
from penstock.transfer_queue import QueueError, ServerInfo

CONNECT_S = 5.0
SILENCE_S = 20.0
"""Servers send a line every 5 s while they live."""
BACKOFF_S = (0.05, 0.5)
LINE_LIMIT_BYTES = 16 << 20
Blame = Literal["nobody", "answer", "full", "gone"]
"""Of an answer that does not go on: nobody's fault, this answer's, a long queue, or a server that is not there."""
BLAMES: dict[int, Blame] = {408: "nobody", 409: "nobody", 429: "full", 503: "gone", 504: "nobody"}


class _Broken(Exception):
    """The answer does not go on there; another server may have it. `blame` decides what happens to this one."""

    def __init__(self, message: str, blame: Blame = "answer", retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.blame, self.retry_after_s = blame, retry_after_s
        self.url = ""


class RolloutClient:
    """`GenerateClient` over HTTP. One per process, for any number of episodes at once."""

    def __init__(
        self,
        queue: Registry,
        token: str,
        timeout_s: float = 120.0,
        home: str | None = None,
        *,
        hedge_after_s: float = 0.0,
    ) -> None:
        """`home`: URL of the server that new episodes go to while it is able; None: to the one with the least load.

        `hedge_after_s`: silence before the first token after which a second server is asked too; 0: never.
        """
        self.timeout_s, self.hedge_after_s = timeout_s, hedge_after_s
        self.refused = 0
        """Times that a server said its queue is long (429)."""
        self._router = Router(queue, home)
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._session: aiohttp.ClientSession | None = None

    async def generate(self, request: GenerateRequest) -> Generation:
        """The whole answer, whatever happened to servers meanwhile. Raises as `stream` does."""
        answer = Answer(request)
        async with aclosing(self._grow(answer)) as chunks:
            async for _ in chunks:
                pass
        return answer.whole()

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        """The answer as it grows, whatever happened to servers meanwhile; no id comes twice.

        `version_spans` count from the start of each chunk; the last chunk, and no other, has `finish_reason`, which is
        never ``abort``. Closing the generator early frees the request in the engine.

        Raises `EngineError`: not retryable where the request itself is wrong, retryable with the last cause where
        `timeout_s`, or the request's own `deadline_s`, ran out.
        """
        async with aclosing(self._grow(Answer(request))) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _grow(self, answer: Answer) -> AsyncGenerator[Chunk]:
        timeout_s = min(self.timeout_s, answer.request.deadline_s or self.timeout_s)
        deadline = time.monotonic() + timeout_s
        cause, avoid, failures = "", "", 0
        while answer.finish_reason is None:
            if time.monotonic() >= deadline:
                raise EngineError(f"no whole answer in {timeout_s:g} s ({len(answer.token_ids)} tokens): {cause}")
            try:
                async with aclosing(until(deadline, self._try_once(answer, deadline, avoid))) as chunks:
                    async for chunk in chunks:
                        failures = 0
                        yield chunk
            except TimeoutError:
                cause = cause or "the servers were too slow"
            except QueueError as error:
                cause, failures = str(error), failures + 1
            except _Broken as error:
                cause, failures = str(error), failures + 1
                avoid = error.url if error.blame != "nobody" else ""
            if failures:
                await asyncio.sleep(min(_backoff_s(failures), max(0.0, deadline - time.monotonic())))

    async def _try_once(self, answer: Answer, deadline: float, avoid: str) -> AsyncGenerator[Chunk]:
        """What one server, or the faster of two, gives of the answer. Raises `_Broken`, `QueueError`."""
        left_s = max(deadline - time.monotonic(), 0.001)
        request = answer.begin_stream().model_copy(update={"deadline_s": left_s})
        server = await self._router.pick(request.episode_id, request.min_version, (avoid,), request.split)
        if server is None:
            raise _Broken(self._nobody(request.min_version), "nobody")
        chunks = self._ask(server, request)
        if self.hedge_after_s > 0:
            chunks = first_to_speak(chunks, self.hedge_after_s, partial(self._second, server, request))
        async with aclosing(chunks):
            async for chunk in chunks:
                if (grown := answer.add(chunk)) is not None:
                    yield grown
                if answer.finish_reason is not None:
                    return

    async def _second(self, first: ServerInfo, request: GenerateRequest) -> AsyncGenerator[Chunk] | None:
        """The same request to another server, where there is one."""
        server = await self._router.pick(request.episode_id, request.min_version, (first.url,), request.split)
        # The first one may win yet; who speaks first is stuck to then.
        self._router.stick(request.episode_id, first.url)
        return None if server is None or server.url == first.url else self._ask(server, request)

    async def _ask(self, server: ServerInfo, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        """One server's chunks, and the router's notes of how it did. No await before `opened`: see there."""
        tokens = len(request.token_ids) + request.sampling.max_new_tokens
        sent = self._router.opened(server.url, tokens, comes_back=bool(request.episode_id))
        try:
            async with aclosing(self._post(server.url, request)) as chunks:
                async for chunk in chunks:
                    self._router.spoke(sent)
                    self._router.stick(request.episode_id, server.url)
                    if chunk.finish_reason in ("stop", "length"):
                        self._router.worked(sent)
                    yield chunk
        except (aiohttp.ClientError, TimeoutError, _Broken) as error:
            raise self._blame(server, sent, error) from error
        finally:
            self._router.closed(sent)

    def _blame(self, server: ServerInfo, sent: Sent, error: Exception) -> _Broken:
        cause = f"{server.server_id} at {server.url}: {error or type(error).__name__}"
        known = error if isinstance(error, _Broken) else _Broken("", "gone")
        broken = _Broken(cause, known.blame)
        broken.url = server.url
        if known.blame == "full":
            self.refused += 1
            self._router.full(sent, known.retry_after_s)
        elif known.blame != "nobody":
            self._router.failed(sent, cause, gone=known.blame == "gone")
        return broken

    async def _post(self, url: str, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        body = request.model_dump_json().encode()
        around = here()
        headers = self._headers if around is None else {**self._headers, **carrier(around)}
        async with self._http().post(f"{url}/generate", data=body, headers=headers) as response:
            if response.status != 200:
                raise await _refusal(response)
            async for line in response.content:
                if not line.strip():
                    continue
                chunk = _parse(line)
                yield chunk
                if chunk.finish_reason == "abort":
                    raise _Broken("the engine aborted the answer", "nobody")
        raise _Broken("the answer broke off", "gone")

    def _nobody(self, min_version: int) -> str:
        states = self._router.describe()
        if not states:
            return "no rollout server is registered"
        return f"no rollout server takes requests at version {min_version} or newer ({states})"

    async def best_version(self) -> int | None:
        """Newest policy version among live servers that accept training's requests; None where there is none."""
        servers = await self._router.servers()
        return max((s.version for s in servers if s.accepting and not s.evaluates), default=None)

    async def servers(self) -> Sequence[ServerInfo]:
        """Newest heartbeats. Raises `QueueError`."""
        return await self._router.servers()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            # Made on first use: a session belongs to the loop that runs then.
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=timeout, read_bufsize=LINE_LIMIT_BYTES, trust_env=False
            )
        return self._session


async def _refusal(response: aiohttp.ClientResponse) -> Exception:
    """A status other than 200, as an exception. Only 4xx that no other server would answer better is final."""
    text, status = (await response.text())[:2000], response.status
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = text
    if 400 <= status < 500 and status not in BLAMES:
        return EngineError(f"the rollout server refused ({status}): {message}", retryable=False)
    retry_after = response.headers.get("Retry-After", "")
    return _Broken(
        f"{status}: {message}", BLAMES.get(status, "answer"), float(retry_after) if retry_after.isdigit() else 1.0
    )


def _parse(line: bytes) -> Chunk:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise _Broken(f"half a line: {line[:80]!r}") from error
    if "error" in value:
        said = value["error"]
        raise _Broken(said["message"], "nobody" if said.get("field") == "deadline_s" else "answer")
    value["version_spans"] = [tuple(span) for span in value["version_spans"]]
    return Chunk.model_construct(**value)


def _backoff_s(failures: int) -> float:
    first, most = BACKOFF_S
    return min(first * 2 ** min(failures - 1, 10), most) * random.uniform(0.5, 1.5)


class Answer:
    """Tokens so far of one request. `begin_stream` before each server's tokens."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[Span] = []
        self.resumed = 0
        self.continued_over_update = False
        self.finish_reason: FinishReason | None = None
        self._stream_versions: set[int] = set()
        self._broken = False

    def begin_stream(self) -> GenerateRequest:
        """What to ask the next server: the context is what was fed and what was sampled, id for id."""
        self._stream_versions, self._broken = set(), bool(self.token_ids)
        if not self.token_ids:
            return self.request
        left = self.request.sampling.max_new_tokens - len(self.token_ids)
        sampling = self.request.sampling.model_copy(update={"max_new_tokens": left})
        return self.request.model_copy(
            update={"token_ids": [*self.request.token_ids, *self.token_ids], "sampling": sampling}
        )

    def add(self, chunk: Chunk) -> Chunk | None:
        """What of `chunk` the reader of this answer gets; None where it says nothing new."""
        if chunk.token_ids and self._broken:
            self.resumed, self._broken = self.resumed + 1, False
        extend_spans(self.spans, chunk.version_spans, len(self.token_ids))
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self._stream_versions.update(version for version, _, _ in chunk.version_spans)
        self.continued_over_update |= len(self._stream_versions) > 1
        # "abort" is the engine's doing, not the policy's: the answer goes on.
        self.finish_reason = None if chunk.finish_reason == "abort" else chunk.finish_reason
        self._finish_by_content()
        if not chunk.token_ids and self.finish_reason is None:
            return None
        return chunk.model_copy(update={"finish_reason": self.finish_reason})

    def _finish_by_content(self) -> None:
        """A server may die between the last token and saying so: the tokens themselves know."""
        if self.finish_reason is not None or not self.token_ids:
            return
        if self.token_ids[-1] in self.request.sampling.stop_token_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.request.sampling.max_new_tokens:
            self.finish_reason = "length"

    def whole(self) -> Generation:
        """The finished answer."""
        assert self.finish_reason is not None
        return Generation(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            version_spans=self.spans,
            finish_reason=self.finish_reason,
            continued_over_update=self.continued_over_update,
            resumed=self.resumed,
        )


T = TypeVar("T")


async def until(deadline: float, items: AsyncGenerator[T]) -> AsyncGenerator[T]:
    """`items`, each awaited until `deadline` (monotonic, seconds) only. Raises `TimeoutError`; closes `items`.

    The time that the reader takes between two items is not cut off.
    """
    async with aclosing(items):
        while True:
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    item = await anext(items)
            except StopAsyncIteration:
                return
            yield item


async def first_to_speak(
    first: AsyncGenerator[T], after_s: float, second: Callable[[], Awaitable[AsyncGenerator[T] | None]]
) -> AsyncGenerator[T]:
    """`first`, or what `second` opens where `first` is silent for `after_s`: whichever yields first is read to its end.

    The other is closed. One that fails before it speaks loses; where both do, the error of the last is raised.
    """
    streams = [first]
    asked: list[asyncio.Task[T]] = []
    try:
        asked.append(asyncio.ensure_future(_first_of(first)))
        await asyncio.wait(asked, timeout=after_s)
        if not asked[0].done() and (other := await second()) is not None:
            streams.append(other)
            asked.append(asyncio.ensure_future(_first_of(other)))
        winner = await _winner(asked)
        await _end([task for task in asked if task is not asked[winner]], streams, keep=winner)
        item = asked[winner].result()
        yield item
        async for item in streams[winner]:
            yield item
    finally:
        await _end(asked, streams)


async def _first_of(items: AsyncGenerator[T]) -> T:
    try:
        return await anext(items)
    except StopAsyncIteration:
        raise EmptyStream from None


class EmptyStream(Exception):
    """A stream ended before it yielded anything."""


async def _winner(asked: list[asyncio.Task[T]]) -> int:
    """Index of the first task that ended well, or of the last one that failed."""
    waiting = set(asked)
    last: asyncio.Task[T] = asked[0]
    while waiting:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in asked:
            if task in done:
                last = task
                if task.exception() is None:
                    return asked.index(task)
    return asked.index(last)


async def _end(tasks: list[asyncio.Task[T]], streams: list[AsyncGenerator[T]], keep: int = -1) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for index, stream in enumerate(streams):
        if index != keep:
            await stream.aclose()
