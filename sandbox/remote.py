"""Client of a sandbox server (`penstock sandbox`): its sessions outlive the worker that opened them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from penstock.sandbox.config import SandboxConfig
from penstock.sandbox.protocol import Output, RunResult, SandboxError, SandboxLost
from penstock.sandbox.remote_http import Answer, RemoteClient, sendable

START_TIMEOUT_S = 150.0
"""A start may wait for a free box; the server's own limit is shorter."""
NETWORK_SLACK_S = 15.0
TTL_HEADROOM_S = 300.0
"""An unused session outlives its episode's deadline by this: a lost worker's lease must run out, another be free."""
USUAL_DEADLINE_S = 600.0
MOST_TTL_S = 86400.0
"""The server's own limit."""


def ttl_of(episode_deadline_s: float) -> float:
    """For how long without use the server keeps a session of an episode."""
    return min(episode_deadline_s + TTL_HEADROOM_S, MOST_TTL_S)


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
        async for line in self._sandbox.client.lines(f"{self._path}/stream", limit_s + NETWORK_SLACK_S, body):
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
        answer = await self._request("POST", verb, limit_s + NETWORK_SLACK_S, json=body)
        return RunResult(**answer.json())

    def _limit_s(self, timeout_s: float | None) -> float:
        return self._sandbox.config.run_timeout_s if timeout_s is None else timeout_s

    async def write_file(self, path: str, data: bytes) -> None:
        await self._request("PUT", "files", NETWORK_SLACK_S, params={"path": sendable(path)}, content=data)

    async def read_file(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        params: dict[str, Any] = {"path": sendable(path), "max_bytes": max_bytes}
        return (await self._request("GET", "files", NETWORK_SLACK_S, params=params)).body

    async def leave(self) -> None:
        """Nothing to do: the server holds the session for its time without use."""

    async def close(self) -> None:
        await self._sandbox.client.request("DELETE", self._path, NETWORK_SLACK_S)

    async def _request(self, method: str, verb: str, timeout_s: float, **content: Any) -> Answer:
        return await self._sandbox.client.request(method, f"{self._path}/{verb}", timeout_s, **content)

    @property
    def _path(self) -> str:
        return f"/sessions/{self.session_id}"


class RemoteSandbox:
    """Opens sessions on the server at `url`; see `RemoteClient` for what is sent again."""

    def __init__(self, config: SandboxConfig, url: str, token: str, ttl_s: float = 900.0) -> None:
        """`ttl_s`: the server ends a session that nobody used for so long."""
        self.config = config
        self.containment = f"remote: as the server at {url} says"
        self.client = RemoteClient(url, token, config.max_boxes + 16)
        self._ttl_s = ttl_s

    async def start(self, label: str, *, image: str | None = None) -> RemoteSession:
        body = {"label": label[:256], "ttl_s": self._ttl_s, "image": image}
        answer = await self.client.request("POST", "/sessions", START_TIMEOUT_S, json=body)
        return RemoteSession(self, answer.json()["session_id"])

    async def attach(self, session_id: str) -> RemoteSession:
        if not (session_id.isascii() and session_id.isalnum()):  # it becomes a part of a path
            raise SandboxLost(f"{session_id!r} is no session's id")
        await self.client.request("GET", f"/sessions/{session_id}", NETWORK_SLACK_S)
        return RemoteSession(self, session_id)

    async def close(self) -> None:
        """Lets go of the connections; sessions live on until closed or unused for their time."""
        await self.client.close()
