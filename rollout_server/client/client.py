"""The agent worker's client: asks a server, continues at another one where the answer breaks off, until the deadline.

    stream:   pick a server ──► POST /generate ──► chunks, to the last one
                   ▲                  │ server gone, draining, full, too old, aborted: keep the tokens, back off
                   └──────────────────┘

Imports neither torch nor transformers.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Literal

import aiohttp
from pydantic_core import from_json

from penstock.common import Backoff, bearer_headers, current_context, trace_headers
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

SILENCE_S = 20.0
"""Longest silence of a live server, which sends a line every 5 s."""
BACKOFF = Backoff(0.05, 0.5, jitter=(0.5, 1.5))
LINE_LIMIT_BYTES = 256 << 20
"""A line may have the routed experts of a whole prompt: of 128,000 tokens up to 160 MB, as base64."""
Blame = Literal["nobody", "answer", "full", "gone"]
"""Cause of an answer that broke off: none of the server's, this answer, a long queue, or an unreachable server."""
BLAMES: dict[int, Blame] = {408: "nobody", 409: "nobody", 429: "full", 503: "gone", 504: "nobody"}
STRANGER_S = 30.0
"""The registry forgets a server sooner: one that answers so for longer is the run's own, and refuses its token."""


class RolloutClient:
    """`GenerateClient` over HTTP. One per process, for any number of concurrent episodes."""

    def __init__(self, queue: Registry, token: str, timeout_s: float = 120.0, home: str | None = None) -> None:
        """`home`: URL of the server that gets new episodes while it is available; None: the least loaded server."""
        self.timeout_s = timeout_s
        self.refused = 0
        """Requests that a server refused because its queue was full (429)."""
        self._router = Router(queue, home)
        self._headers = {**bearer_headers(token), "Content-Type": "application/json"}
        self._session: aiohttp.ClientSession | None = None

    async def generate(self, request: GenerateRequest) -> Generation:
        """Returns the whole answer, over server failures. Raises as `stream` does."""
        answer = AnswerBuilder(request.model_copy(update={"whole": True}))
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
        # Turns of the trainer do not count as time of an answer, for an hour.
        deadline, asleep_until = time.monotonic() + timeout_s, time.monotonic() + 3600.0
        cause, avoid, failures, refused_since = "", "", 0, math.inf
        while answer.finish_reason is None:
            began = time.monotonic()
            if began >= deadline:
                tokens = f"{len(answer.token_ids)} tokens in {timeout_s:g} s (rollout.request_timeout_s)"
                raise EngineError(f"no whole answer: {tokens}: {cause}")
            try:
                async with aclosing(self._attempt(answer, deadline, avoid)) as chunks:
                    async for chunk in chunks:
                        failures, refused_since = 0, math.inf
                        yield chunk
            except TimeoutError:
                cause = cause or "the servers were too slow"
            except QueueError as error:
                cause, failures = str(error), failures + 1
            except _Broken as error:
                cause, failures = str(error), failures + 1
                avoid = error.avoid
                refused_since = _refused_since(error, began, refused_since)
                if error.disproved and answer.take_back() and not may_take_back:
                    raise VersionsDisproved(cause) from error
            if answer.finish_reason is None and answer.finish_by_content():
                yield Chunk(finish_reason=answer.finish_reason)
                return
            if failures:
                await asyncio.sleep(min(BACKOFF.pause_s(failures), max(0.0, deadline - time.monotonic())))
            deadline += self._slept_s(answer.request, began, asleep_until)

    def _slept_s(self, request: GenerateRequest, began: float, until: float) -> float:
        """Seconds since `began`, if all servers sleep because the trainer has their devices: these do not count as time
        of the answer, unless the request has its own deadline. 0 after `until`."""
        asleep = request.deadline_s is None and began < until and self._router.asleep(request.split)
        return time.monotonic() - began if asleep else 0.0

    async def _attempt(self, answer: AnswerBuilder, deadline: float, avoid: str) -> AsyncGenerator[Chunk]:
        """Adds what one server streams, and reports its result to the router. Raises `_Broken`, `QueueError`,
        `TimeoutError`.

        The deadline holds for each wait; the time a reader takes between two chunks is not cut off.
        """
        request = answer.next_request(max(deadline - time.monotonic(), 0.001))
        tokens = len(request.token_ids) + request.sampling.max_new_tokens
        async with _until(deadline):
            server = await self._router.pick(
                request.episode_id,
                request.min_version,
                (avoid,),
                request.split,
                prefix=request.prefix,
                tokens=tokens,
            )
        if server is None:
            raise _Broken(self._no_server(request.min_version), "nobody")
        pending = self._router.begin(server.url, tokens, sticky=bool(request.episode_id))  # no await before: see there
        try:
            async with _until(deadline):
                response = await self._post(server, request)
            async with response:
                while answer.finish_reason is None:
                    async with _until(deadline):
                        line = await response.content.readline()
                    if not line:
                        raise _Broken("the answer broke off", "gone")
                    if not line.strip():  # keep-alive
                        continue
                    chunk = _parse(line)
                    self._router.first_tokens(pending)
                    if chunk.finish_reason in ("stop", "length"):
                        self._router.succeeded(pending)
                    if (added := answer.add(chunk)) is not None:
                        yield added
                    if chunk.finish_reason == "abort":
                        raise _Broken("the engine aborted the answer", "nobody")
        except (aiohttp.ClientError, _Broken) as error:
            raise self._broken(server, pending, error) from error
        finally:
            self._router.end(pending)

    async def _post(self, server: ServerInfo, request: GenerateRequest) -> aiohttp.ClientResponse:
        """Raises `_Broken`, `EngineError`, `aiohttp.ClientError`."""
        headers = {**self._headers, **trace_headers(current_context())}
        body = request.model_dump_json().encode()
        response = await self._http().post(f"{server.url}/generate", data=body, headers=headers)
        if response.status == 200:
            return response
        async with response:
            raise await _refusal(response)

    def _broken(self, server: ServerInfo, pending: PendingRequest, error: Exception) -> _Broken:
        """Reports the failure to the router, and names the server in the error."""
        cause = f"{server.server_id} at {server.url}: {error or type(error).__name__}"
        known = error if isinstance(error, _Broken) else _Broken("", "gone")
        avoid = "" if known.blame == "nobody" else server.url
        broken = _Broken(cause, known.blame, avoid=avoid, disproved=known.disproved, refused=known.refused)
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
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=SILENCE_S)
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=timeout, read_bufsize=LINE_LIMIT_BYTES, trust_env=False
            )
        return self._session


def _until(deadline: float) -> asyncio.Timeout:
    return asyncio.timeout(deadline - time.monotonic())


# HTTP --------------------------------------------------------------------------------------------------------------
class _Broken(Exception):
    """The answer does not continue at this server; another one may have it.

    `blame` is what the router learns; `avoid` is the URL that the next attempt does not go to.
    """

    def __init__(
        self,
        message: str,
        blame: Blame = "answer",
        retry_after_s: float = 1.0,
        avoid: str = "",
        *,
        disproved: bool = False,
        refused: bool = False,
    ) -> None:
        super().__init__(message)
        self.blame, self.retry_after_s, self.avoid = blame, retry_after_s, avoid
        self.disproved, self.refused = disproved, refused


def _refused_since(error: _Broken, began: float, since: float) -> float:
    """When the first of the refusals in a row began; `since` was it before the attempt that `began`.

    Raises `EngineError`, not retryable, if they last longer than a stranger could have caused.
    """
    if not error.refused:
        return since
    since = min(since, began)
    if time.monotonic() - since > STRANGER_S:
        raise EngineError(f"refused for {STRANGER_S:g} s: {error}", retryable=False) from error
    return since


async def _refusal(response: aiohttp.ClientResponse) -> Exception:
    """Converts a status other than 200. A 4xx that every server would give is final."""
    text, status = (await response.read())[:2000].decode(errors="replace"), response.status
    try:
        error = json.loads(text)["error"]
        message, field = error["message"], error.get("field")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, field = text, None
    if status == 422 and field:
        return BadRequest(field, message.removeprefix(f"{field}: "))
    if status in (401, 403, 404, 405):  # no server of this run: another program has the address of one that was killed
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
        if "error" not in value:
            value["version_spans"] = [tuple(span) for span in value["version_spans"]]
            return Chunk.model_construct(**value)
        field, message = value["error"].get("field"), value["error"]["message"]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _Broken(f"half a line, or another program's: {line[:80]!r}", "gone") from error
    raise _Broken(message, "nobody" if field == "deadline_s" else "answer", disproved=field == "version_spans")
