"""Client of a sandbox server (`penstock sandbox`): its sessions outlive the worker that opened them."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx

from penstock.sandbox.call_key import HEADER, request_key
from penstock.sandbox.config import SandboxConfig
from penstock.sandbox.protocol import Output, RunResult, SandboxBusy, SandboxError, SandboxLost

CONNECT_TIMEOUT_S = 5.0
START_TIMEOUT_S = 150.0
"""A start may wait for a free box; the server's own limit is shorter."""
NETWORK_SLACK_S = 15.0
RETRY_AFTER_S = (0.1, 1.0)
"""Requests with a key are sent again where the connection broke: the server does none of them twice."""
BUSY_TIMEOUT_S = 120.0
"""How long a refusal for want of room is asked again: nothing was done, so nothing can be done twice."""
PATH_MAX_BYTES = 4096
"""Linux's PATH_MAX, its closing NUL included."""
TTL_HEADROOM_S = 300.0
"""An unused session outlives its episode's deadline by this: a lost worker's lease must run out, another be free."""


class RemoteSession:
    """One session on the server. Whoever knows its id and has the token of its opener can attach to it."""

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
        async for line in self._sandbox.lines(f"{self._path}/stream", limit_s + NETWORK_SLACK_S, body):
            if "result" in line:
                result = RunResult(**line["result"])
            else:
                yield Output(line["stream"], line["data"])
        if result is None:
            raise SandboxError(f"sandbox server {self._sandbox.url}: the stream ended before its result")
        yield Output("stdout", "", result)

    async def run_python(self, code: str, *, timeout_s: float | None = None) -> RunResult:
        return await self._run("run_python", {"code": code}, timeout_s)

    async def run_shell(self, command: str, *, timeout_s: float | None = None) -> RunResult:
        return await self._run("run_shell", {"command": command}, timeout_s)

    async def _run(self, verb: str, body: dict[str, Any], timeout_s: float | None) -> RunResult:
        limit_s = self._limit_s(timeout_s)
        body["timeout_s"] = limit_s
        answer = await self._request("POST", verb, limit_s + NETWORK_SLACK_S, json=body)
        return RunResult(**answer.json())

    def _limit_s(self, timeout_s: float | None) -> float:
        return self._sandbox.config.run_timeout_s if timeout_s is None else timeout_s

    async def write_file(self, path: str, data: bytes) -> None:
        await self._request("PUT", "files", NETWORK_SLACK_S, params={"path": _sendable(path)}, content=data)

    async def read_file(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        params: dict[str, Any] = {"path": _sendable(path), "max_bytes": max_bytes}
        return (await self._request("GET", "files", NETWORK_SLACK_S, params=params)).content

    async def leave(self) -> None:
        """Nothing to do: the server holds the session for its time without use."""

    async def close(self) -> None:
        await self._sandbox.request("DELETE", self._path, NETWORK_SLACK_S)

    async def _request(self, method: str, verb: str, timeout_s: float, **content: Any) -> httpx.Response:
        return await self._sandbox.request(method, f"{self._path}/{verb}", timeout_s, **content)

    @property
    def _path(self) -> str:
        return f"/sessions/{self.session_id}"


class RemoteSandbox:
    """Opens sessions on the server at `url`.

    Requests within a tool's call carry a key (`call_key.py`): they are sent again where the connection broke. Others
    only where the server refused them for want of room: a run that was asked for twice may happen twice.
    """

    def __init__(self, config: SandboxConfig, url: str, token: str, ttl_s: float = 900.0) -> None:
        """`ttl_s`: the server ends a session that nobody used for so long."""
        self.config = config
        self.containment = f"remote: as the server at {url} says"
        self.url = url
        self._ttl_s = ttl_s
        self._busy_timeout_s = BUSY_TIMEOUT_S
        limits = httpx.Limits(max_connections=config.max_boxes + 16)
        self._http = httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {token}"}, limits=limits)

    async def start(self, label: str, *, image: str | None = None) -> RemoteSession:
        body = {"label": label[:256], "ttl_s": self._ttl_s, "image": image}
        answer = await self.request("POST", "/sessions", START_TIMEOUT_S, json=body)
        return RemoteSession(self, answer.json()["session_id"])

    async def attach(self, session_id: str) -> RemoteSession:
        await self.request("GET", f"/sessions/{session_id}", NETWORK_SLACK_S)
        return RemoteSession(self, session_id)

    async def close(self) -> None:
        """Lets go of the connections; sessions live on until closed or unused for their time."""
        await self._http.aclose()

    async def request(self, method: str, path: str, timeout_s: float, **content: Any) -> httpx.Response:
        """Raises `SandboxLost` (404), `SandboxBusy` (429, 503 of the queue), `OSError` (a file's), `SandboxError`."""
        deadline = time.monotonic() + self._busy_timeout_s
        while True:
            try:
                return await self._request(method, path, timeout_s, content)
            except SandboxBusy as busy:
                wait_s = (busy.after_s or 1.0) * random.uniform(1.0, 1.5)
                if time.monotonic() + wait_s > deadline:
                    raise
                await asyncio.sleep(wait_s)

    async def _request(self, method: str, path: str, timeout_s: float, content: dict[str, Any]) -> httpx.Response:
        key = _key_of(method, path, content)
        for pause_s in RETRY_AFTER_S if key else ():
            try:
                return await self._send(method, path, timeout_s, key, content)
            except (httpx.NetworkError, httpx.RemoteProtocolError):
                await asyncio.sleep(pause_s)
        try:
            return await self._send(method, path, timeout_s, key, content)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    async def _send(
        self, method: str, path: str, timeout_s: float, key: str | None, content: dict[str, Any]
    ) -> httpx.Response:
        sent = _encoded(content)
        headers = {**sent.pop("headers", {}), **({HEADER: key} if key else {})}
        answer = await self._http.request(method, path, timeout=_timeout(timeout_s), headers=headers, **sent)
        if answer.is_error:
            raise _failure(self.url, answer)
        return answer

    async def lines(self, path: str, timeout_s: float, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """JSON lines of an answer as they come; the errors of `request`."""
        deadline = time.monotonic() + timeout_s
        try:
            content = _encoded({"json": body})
            async with self._http.stream("POST", path, timeout=_timeout(timeout_s), **content) as answer:
                if answer.is_error:
                    await answer.aread()
                    raise _failure(self.url, answer)
                async for line in answer.aiter_lines():
                    if time.monotonic() > deadline:
                        raise SandboxError(f"sandbox server {self.url}: no end of the stream in {timeout_s:.0f} s")
                    yield _checked(self.url, json.loads(line))
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> SandboxError:
        return SandboxError(f"sandbox server {self.url}: {type(error).__name__} {error}")


def _encoded(content: dict[str, Any]) -> dict[str, Any]:
    """JSON that can be sent whatever a model wrote: half a character (a lone surrogate) becomes ``?``."""
    if "json" not in content:
        return dict(content)
    text = json.dumps(content["json"], ensure_ascii=False)
    return {"content": text.encode("utf-8", "replace"), "headers": {"Content-Type": "application/json"}}


def _sendable(path: str) -> str:
    """Raises `OSError` for a path that no file can have: it would not fit into a request line either."""
    try:
        size = len(path.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise OSError(errno.EINVAL, f"no file has this name: {error.reason}") from error
    if size >= PATH_MAX_BYTES:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    return path


def _timeout(timeout_s: float) -> httpx.Timeout:
    return httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)


def _checked(url: str, line: dict[str, Any]) -> dict[str, Any]:
    """The status line is long gone where a streamed run fails: its last line says how."""
    if "error" in line:
        kind = SandboxLost if line["error"].get("lost") else SandboxError
        raise kind(f"sandbox server {url}: {line['error'].get('message')}")
    return line


def _failure(url: str, answer: httpx.Response) -> Exception:
    body = _error_of(answer)
    field = f"{body['field']}: " if "field" in body else ""
    detail = f"{field}{body.get('message', answer.text[:200])}"
    if answer.status_code == 404:
        return SandboxLost(detail)
    if answer.status_code == 409 and "errno" in body:
        return OSError(body["errno"], detail)
    if answer.status_code == 401:
        return SandboxError(f"sandbox server {url} refuses this token")
    if answer.status_code in (429, 503) and "retry-after" in answer.headers:
        return SandboxBusy(f"sandbox server {url}: {detail}", float(answer.headers["retry-after"]))
    return SandboxError(f"sandbox server {url} answered {answer.status_code}: {detail}")


def _error_of(answer: httpx.Response) -> dict[str, Any]:
    try:
        error = answer.json()["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    return error if isinstance(error, dict) else {}


def _key_of(method: str, path: str, content: dict[str, Any]) -> str | None:
    """Of a request that does something; its session is no part of it, since the server keeps answers by session."""
    if not content:
        return None
    verb = path.rpartition("/")[2]
    plain = json.dumps([content.get("json"), content.get("params")], sort_keys=True)
    return request_key(method.encode(), verb.encode(), plain.encode(), content.get("content", b""))
