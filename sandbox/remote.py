"""Client of a sandbox server (`penstock sandbox`): its sessions outlive the worker that opened them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from penstock.sandbox.call_key import HEADER, request_key
from penstock.sandbox.config import SandboxConfig
from penstock.sandbox.protocol import RunResult, SandboxError, SandboxLost

CONNECT_TIMEOUT_S = 5.0
START_TIMEOUT_S = 150.0
"""A start may wait for a free box; the server's own limit is shorter."""
NETWORK_SLACK_S = 15.0
RETRY_AFTER_S = (0.1, 1.0)
"""Requests with a key are sent again where the server did not answer: it does none of them twice."""


class RemoteSession:
    def __init__(self, sandbox: RemoteSandbox, session_id: str) -> None:
        self.session_id = session_id
        self._sandbox = sandbox

    async def run(self, argv: list[str], *, stdin: str = "", timeout_s: float | None = None) -> RunResult:
        return await self._run("run", {"argv": argv, "stdin": stdin}, timeout_s)

    async def run_python(self, code: str, *, timeout_s: float | None = None) -> RunResult:
        return await self._run("run_python", {"code": code}, timeout_s)

    async def _run(self, verb: str, body: dict[str, Any], timeout_s: float | None) -> RunResult:
        limit_s = self._sandbox.config.run_timeout_s if timeout_s is None else timeout_s
        body["timeout_s"] = limit_s
        answer = await self._request("POST", verb, limit_s + NETWORK_SLACK_S, json=body)
        return RunResult(**answer.json())

    async def write_file(self, path: str, data: bytes) -> None:
        await self._request("PUT", "files", NETWORK_SLACK_S, params={"path": path}, content=data)

    async def read_file(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        params: dict[str, Any] = {"path": path, "max_bytes": max_bytes}
        return (await self._request("GET", "files", NETWORK_SLACK_S, params=params)).content

    async def leave(self) -> None:
        """Nothing to do: the server holds the session for its time without use."""

    async def close(self) -> None:
        await self._sandbox.request("DELETE", f"/sessions/{self.session_id}", NETWORK_SLACK_S)

    async def _request(self, method: str, verb: str, timeout_s: float, **content: Any) -> httpx.Response:
        return await self._sandbox.request(method, f"/sessions/{self.session_id}/{verb}", timeout_s, **content)


class RemoteSandbox:
    """Opens sessions on the server at `url`.

    Requests within a tool's call carry a key (`call_key.py`) and are sent again where the connection broke. Others are
    not: a run that was asked for twice may happen twice.
    """

    def __init__(self, config: SandboxConfig, url: str, token: str, ttl_s: float = 900.0) -> None:
        self.config = config
        self.containment = f"remote: as the server at {url} says"
        self._url = url
        self._ttl_s = ttl_s
        limits = httpx.Limits(max_connections=config.max_boxes + 16)
        self._http = httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {token}"}, limits=limits)

    async def start(self, label: str) -> RemoteSession:
        body = {"label": label[:256], "ttl_s": self._ttl_s}
        answer = await self.request("POST", "/sessions", START_TIMEOUT_S, json=body)
        return RemoteSession(self, answer.json()["session_id"])

    async def attach(self, session_id: str) -> RemoteSession:
        await self.request("GET", f"/sessions/{session_id}", NETWORK_SLACK_S)
        return RemoteSession(self, session_id)

    async def close(self) -> None:
        """Lets go of the connections; sessions live on until closed or unused for their time."""
        await self._http.aclose()

    async def request(self, method: str, path: str, timeout_s: float, **content: Any) -> httpx.Response:
        """Raises `SandboxLost` (404), `OSError` (a file's), `SandboxError` (all else, network included)."""
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
        key = _key_of(method, path, content) if content else None
        headers = {HEADER: key} if key else {}
        pauses = list(RETRY_AFTER_S) if key else []
        while True:
            try:
                answer = await self._http.request(method, path, timeout=timeout, headers=headers, **content)
                break
            except httpx.HTTPError as error:
                if not pauses or not isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError):
                    raise SandboxError(f"sandbox server {self._url}: {type(error).__name__} {error}") from error
            await asyncio.sleep(pauses.pop(0))
        if answer.is_error:
            raise _failure(self._url, answer)
        return answer


def _failure(url: str, answer: httpx.Response) -> Exception:
    try:
        body = answer.json()
    except ValueError:
        body = {}
    detail = f"{body.get('detail', answer.text[:200])}"
    if answer.status_code == 404:
        return SandboxLost(detail)
    if answer.status_code == 409 and "errno" in body:
        return OSError(body["errno"], detail)
    if answer.status_code == 401:
        return SandboxError(f"sandbox server {url} refuses this token")
    return SandboxError(f"sandbox server {url} answered {answer.status_code}: {detail}")


def _key_of(method: str, path: str, content: dict[str, Any]) -> str | None:
    """Of a request that does something; its session is no part of it, since the server keeps answers by session."""
    verb = path.rpartition("/")[2]
    plain = json.dumps([content.get("json"), content.get("params")], sort_keys=True)
    return request_key(method.encode(), verb.encode(), plain.encode(), content.get("content", b""))
