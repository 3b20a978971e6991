"""HTTP to a sandbox server: what is sent again and what is not, and every refusal as the error it stands for."""

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
from penstock.sandbox.protocol import SandboxBusy, SandboxError, SandboxLost

CONNECT_TIMEOUT_S = 5.0
BUSY_TIMEOUT_S = 120.0
"""How long a refusal for want of room is asked again: nothing was done, so nothing can be done twice."""
PATH_MAX_BYTES = 4096
"""Linux's PATH_MAX, its closing NUL included."""
JSON = {"Content-Type": "application/json"}
RETRY_AFTER_S = (0.1, 1.0)
"""Requests with a key are sent again where the server did not answer: it does none of them twice."""


class RemoteClient:
    """One connection pool. Requests within a tool's call carry a key (`call_key.py`); a request without one is sent
    again only where the server refused it for want of room: a run that was asked for twice may happen twice."""

    def __init__(self, url: str, token: str, max_connections: int) -> None:
        self.url = url
        self.busy_timeout_s = BUSY_TIMEOUT_S
        limits = httpx.Limits(max_connections=max_connections)
        self._http = httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {token}"}, limits=limits)

    async def close(self) -> None:
        await self._http.aclose()

    async def request(self, method: str, path: str, timeout_s: float, **content: Any) -> httpx.Response:
        """Raises `SandboxLost` (404), `SandboxBusy` (no room), `OSError` (a file's), `SandboxError` (all else)."""
        deadline = time.monotonic() + self.busy_timeout_s
        key = _key_of(method, path, content) if content else None
        while True:
            answer = await self._send(method, path, timeout_s, key, content)
            if not answer.is_error:
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
    ) -> httpx.Response:
        headers = {**({HEADER: key} if key else {}), **(JSON if "json" in content else {})}
        pauses = list(RETRY_AFTER_S) if key else []
        while True:
            try:
                sent = _encoded(content)
                return await self._http.request(method, path, timeout=_timeout(timeout_s), headers=headers, **sent)
            except httpx.HTTPError as error:
                if not pauses or not isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError):
                    raise self._unreachable(error) from error
            await asyncio.sleep(pauses.pop(0))

    async def lines(self, path: str, timeout_s: float, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """JSON lines of an answer as they come; the errors of `request`. Never sent again."""
        deadline = time.monotonic() + timeout_s
        try:
            content = _encoded({"json": body})
            async with self._http.stream("POST", path, timeout=_timeout(timeout_s), headers=JSON, **content) as answer:
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
        return content
    return {"content": json.dumps(content["json"], ensure_ascii=False).encode("utf-8", "replace")}


def sendable(path: str) -> str:
    """Raises `OSError` for a path that no file can have: it would not fit into a request line either."""
    try:
        size = len(path.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise OSError(errno.EINVAL, f"no file has this name: {error.reason}") from error
    if not 0 < size < PATH_MAX_BYTES:
        number = errno.ENAMETOOLONG if size else errno.ENOENT
        raise OSError(number, os.strerror(number))
    return path


def _timeout(timeout_s: float) -> httpx.Timeout:
    return httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)


def _key_of(method: str, path: str, content: dict[str, Any]) -> str | None:
    """Of a request that does something; its session is no part of it, since the server keeps answers by session."""
    verb = path.rpartition("/")[2]
    plain = json.dumps([content.get("json"), content.get("params")], sort_keys=True)
    return request_key(method.encode(), verb.encode(), plain.encode(), content.get("content", b""))


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
