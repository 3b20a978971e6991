"""Client of a sandbox server (`penstock sandbox`), whose sessions outlive the worker that opened them.

`RemoteClient` decides which requests are sent again, and maps every refusal to its error.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import random
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp

from penstock.common import bearer_headers
from penstock.sandbox.config import SandboxConfig
from penstock.sandbox.idempotency import HEADER, request_key
from penstock.sandbox.protocol import (
    BoxNeeds,
    NoSnapshots,
    NoSuchImage,
    Output,
    RunResult,
    SandboxBusy,
    SandboxError,
    SandboxLost,
    Session,
    Snapshot,
    UnmetNeeds,
)
from penstock.sandbox.session import GRACE_S

NO_COPIES = "sandbox.backend remote: a server's boxes cannot be copied: use its own backend here"
START_TIMEOUT_S = 150.0
"""A start may wait for a free box; the server's own limit is shorter."""
SHORT_CALL_S = 60.0
"""For calls that run no code: a box that is ended, or a file command, for which the server waits 20 s."""
RUN_SLACK_S = GRACE_S + 10.0
"""The server waits `GRACE_S` for a driver before it ends the box: its report must not be cut off."""
TTL_HEADROOM_S = 300.0
"""An unused session outlives its episode's deadline by this: a lost worker's lease must run out, another be free."""


def ttl_of(episode_deadline_s: float | None) -> float:
    """Return how long the server keeps an unused session of an episode: 86,400 s at most, the server's own limit."""
    return min((episode_deadline_s or 600.0) + TTL_HEADROOM_S, 86400.0)


class RemoteSession:
    """One session on the server. A client with its id and its opener's token can attach to it."""

    def __init__(self, sandbox: RemoteSandbox, session_id: str) -> None:
        self.session_id = session_id
        self._sandbox = sandbox

    async def run(
        self, argv: list[str], *, stdin: str = "", timeout_s: float | None = None, cwd: str | None = None
    ) -> RunResult:
        return await self._run("run", {"argv": argv, "stdin": stdin, "cwd": cwd}, timeout_s)

    async def stream(
        self, argv: list[str], *, stdin: str = "", timeout_s: float | None = None, cwd: str | None = None
    ) -> AsyncIterator[Output]:
        """The server finishes a run whose reader left: its box and its state stay as they are."""
        limit_s = self._limit_s(timeout_s)
        body = {"argv": argv, "stdin": stdin, "cwd": cwd, "timeout_s": limit_s}
        result = None
        async for line in self._sandbox.client.lines(f"{self._path}/stream", limit_s + RUN_SLACK_S, body):
            if "result" in line:
                result = RunResult(**line["result"])
            else:
                yield Output(line["stream"], line["data"])
        if result is None:
            raise SandboxError(f"sandbox server {self._sandbox.client.url}: the stream ended before its result")
        yield Output("stdout", "", result)

    async def run_python(self, code: str, *, timeout_s: float | None = None) -> RunResult:
        return await self._run("run_python", {"code": code}, timeout_s)

    async def run_shell(self, command: str, *, timeout_s: float | None = None) -> RunResult:
        return await self._run("run_shell", {"command": command}, timeout_s)

    async def _run(self, verb: str, body: dict[str, Any], timeout_s: float | None) -> RunResult:
        limit_s = self._limit_s(timeout_s)
        body["timeout_s"] = limit_s
        answer = await self._request("POST", verb, limit_s + RUN_SLACK_S, json=body)
        return RunResult(**answer.json())

    def _limit_s(self, timeout_s: float | None) -> float:
        return self._sandbox.config.run_timeout_s if timeout_s is None else timeout_s

    async def write_file(self, path: str, data: bytes) -> None:
        await self._request("PUT", "files", SHORT_CALL_S, params={"path": sendable(path)}, content=data)

    async def read_file(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        params: dict[str, Any] = {"path": sendable(path), "max_bytes": max_bytes}
        return (await self._request("GET", "files", SHORT_CALL_S, params=params)).body

    async def leave(self) -> None:
        """Does nothing: the server keeps the session until its time without use is over."""

    async def close(self) -> None:
        await self._sandbox.client.request("DELETE", self._path, SHORT_CALL_S)

    async def _request(self, method: str, verb: str, timeout_s: float, **content: Any) -> HttpReply:
        return await self._sandbox.client.request(method, f"{self._path}/{verb}", timeout_s, **content)

    @property
    def _path(self) -> str:
        return f"/sessions/{self.session_id}"


class RemoteSandbox:
    """Opens sessions on the server at `url`; see `RemoteClient` for what is sent again."""

    def __init__(self, config: SandboxConfig, url: str, token: str, ttl_s: float = 900.0) -> None:
        """`ttl_s`: the server ends a session after this time without use."""
        self.config = config
        self.containment = f"remote: as the server at {url} reports"
        self.client = RemoteClient(url, token, config.max_boxes + 16)
        self._ttl_s = ttl_s

    def check_needs(self, needs: BoxNeeds) -> None:
        """The server's, which checks them."""

    async def start(self, label: str, *, image: str | None = None, needs: BoxNeeds | None = None) -> RemoteSession:
        body = {"label": label[:256], "ttl_s": self._ttl_s, "image": image}
        if needs is not None:
            body["needs"] = asdict(needs)
        answer = await self.client.request("POST", "/sessions", START_TIMEOUT_S, json=body)
        return RemoteSession(self, answer.json()["session_id"])

    async def attach(self, session_id: str) -> RemoteSession:
        if not (session_id.isascii() and session_id.isalnum()):  # it becomes a part of a path
            raise SandboxLost(f"{session_id!r} is not a session's id")
        await self.client.request("GET", f"/sessions/{session_id}", SHORT_CALL_S)
        return RemoteSession(self, session_id)

    async def snapshot(self, session: Session) -> Snapshot:
        raise NoSnapshots(NO_COPIES)

    async def fork(self, snapshot: Snapshot, label: str) -> Session:
        raise NoSnapshots(NO_COPIES)

    async def forget(self, snapshot: Snapshot) -> None:
        """There is none."""

    async def close(self) -> None:
        """Closes the connections; sessions live until closed or unused for their time."""
        await self.client.close()


RETRY_AFTER_S = (0.1, 1.0)
"""Requests with a key are sent again where the server did not answer: it does none of them twice."""
KEEP_ALIVE_S = 30.0
"""Idle connections are ours to close: one that the server closes just when we write to it loses a request."""


@dataclass(frozen=True, slots=True)
class HttpReply:
    status: int
    body: bytes
    retry_after: str | None

    def json(self) -> Any:
        """Raises `ValueError`."""
        return json.loads(self.body)


class RemoteClient:
    """One connection pool. Requests within a tool's call carry a key (`idempotency`); a request without one is sent
    again only where the server refused it for want of room: a run that was asked for twice may happen twice."""

    def __init__(self, url: str, token: str, max_connections: int) -> None:
        self.url = url.rstrip("/")
        # A refusal for lack of room is retried: nothing was done, so nothing can be done twice.
        self.busy_timeout_s = 120.0
        self._headers = bearer_headers(token)
        self._max_connections = max_connections
        self._session: aiohttp.ClientSession | None = None

    @property
    def _http(self) -> aiohttp.ClientSession:
        """Made at the first request: aiohttp wants a running loop."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._max_connections, keepalive_timeout=KEEP_ALIVE_S)
            jar = aiohttp.DummyCookieJar()
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, cookie_jar=jar)
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def request(self, method: str, path: str, timeout_s: float, **content: Any) -> HttpReply:
        """Raises `SandboxLost` (404), `SandboxBusy` (no room), `OSError` (a file's), `SandboxError` (all else)."""
        deadline = time.monotonic() + self.busy_timeout_s
        key = None
        if content:  # its session is not a part of the key: the server keeps answers by session
            verb = path.rpartition("/")[2]
            plain = json.dumps([content.get("json"), content.get("params")], sort_keys=True)
            key = request_key(method.encode(), verb.encode(), plain.encode(), content.get("content", b""))
        while True:
            answer = await self._send(method, path, timeout_s, key, content)
            if answer.status < 400:
                return answer
            failure = _failure(self.url, answer)
            if not isinstance(failure, SandboxBusy):
                raise failure
            wait_s = (failure.after_s or 1.0) * random.uniform(1.0, 1.5)
            if time.monotonic() + wait_s > deadline:
                raise failure
            await asyncio.sleep(wait_s)

    async def _send(
        self, method: str, path: str, timeout_s: float, key: str | None, content: dict[str, Any]
    ) -> HttpReply:
        pauses = list(RETRY_AFTER_S) if key else []
        while True:
            try:
                async with self._http.request(method, self.url + path, **_sent(timeout_s, content, key)) as response:
                    return HttpReply(response.status, await response.read(), response.headers.get("Retry-After"))
            except TimeoutError as error:  # the request may be under way there
                raise self._unreachable(error) from error
            except aiohttp.ClientError as error:
                if not pauses or not isinstance(error, aiohttp.ClientConnectionError | aiohttp.ClientPayloadError):
                    raise self._unreachable(error) from error
            await asyncio.sleep(pauses.pop(0))

    async def lines(self, path: str, timeout_s: float, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """JSON lines of an answer as they come; the errors of `request`. Never sent again."""
        try:
            async with self._http.post(self.url + path, **_sent(timeout_s, {"json": body})) as response:
                if response.status >= 400:
                    after = response.headers.get("Retry-After")
                    raise _failure(self.url, HttpReply(response.status, await response.read(), after))
                rest = b""
                async for data in response.content.iter_any():
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        yield _checked(self.url, json.loads(line))
        except TimeoutError as error:
            raise SandboxError(f"sandbox server {self.url}: no end of the stream in {timeout_s:.0f} s") from error
        except aiohttp.ClientError as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> SandboxError:
        return SandboxError(f"sandbox server {self.url}: {type(error).__name__} {error}")


def _sent(timeout_s: float, content: dict[str, Any], key: str | None = None) -> dict[str, Any]:
    """JSON that can be sent whatever a model wrote: half a character (a lone surrogate) becomes ``?``."""
    headers = {HEADER: key} if key else {}
    data = content.get("content")
    if "json" in content:
        headers["Content-Type"] = "application/json"
        data = json.dumps(content["json"], ensure_ascii=False).encode("utf-8", "replace")
    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=5.0)
    return {"params": content.get("params"), "data": data, "headers": headers, "timeout": timeout}


def sendable(path: str) -> str:
    """Raises `OSError` for a path that no file can have: it would not fit into a request line either."""
    try:
        size = len(path.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise OSError(errno.EINVAL, f"no file has this name: {error.reason}") from error
    # Linux's PATH_MAX, its closing NUL included
    if not 0 < size < 4096:
        number = errno.ENAMETOOLONG if size else errno.ENOENT
        raise OSError(number, os.strerror(number))
    return path


def _checked(url: str, line: dict[str, Any]) -> dict[str, Any]:
    """The status line is long gone where a streamed run fails: its last line says how."""
    if "error" in line:
        kind = SandboxLost if line["error"].get("lost") else SandboxError
        raise kind(f"sandbox server {url}: {line['error'].get('message')}")
    return line


_REFUSED: dict[str, type[SandboxError]] = {"body.image": NoSuchImage, "body.needs": UnmetNeeds}


def _failure(url: str, answer: HttpReply) -> Exception:
    body: dict[str, Any] = {}
    with contextlib.suppress(ValueError, KeyError, TypeError):
        body = dict(answer.json()["error"])
    field = f"{body['field']}: " if "field" in body else ""
    detail = f"{field}{body.get('message', answer.body[:200].decode('utf-8', 'replace'))}"
    if answer.status == 404:
        return SandboxLost(detail)
    if answer.status == 409 and "errno" in body:
        return OSError(body["errno"], detail)
    if answer.status == 401:
        return SandboxError(f"sandbox server {url} refuses this token")
    if answer.status in (429, 503) and answer.retry_after is not None:
        return SandboxBusy(f"sandbox server {url}: {detail}", float(answer.retry_after))
    kind = _REFUSED.get(str(body.get("field")), SandboxError) if answer.status == 422 else SandboxError
    return kind(f"sandbox server {url} answered {answer.status}: {detail}")
