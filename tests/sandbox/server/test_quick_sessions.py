"""Starts, runs and ends of sessions bypass FastAPI. Their responses equal those of its routes."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from penstock.sandbox import RemoteSandbox, as_call

pytestmark = pytest.mark.bwrap

QUICK = "application/json"
ROUTED = "application/json; charset=utf-8"
"""`QuickSessions` leaves this content type to the routes."""


async def test_quick_sessions_need_no_route(remote: RemoteSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    async def routed(*_: Any) -> None:
        raise AssertionError("a route of FastAPI")

    monkeypatch.setattr("starlette.routing.Route.handle", routed)
    with as_call("call 1"):
        session = await remote.start("quick")
    assert (await session.run(["echo", "1"])).stdout == "1\n"
    assert (await session.run_python("x = 40; x + 2")).stdout == "42\n"
    assert (await session.run_shell("exit 3")).exit_code == 3
    await session.close()


@pytest.mark.parametrize(
    ("verb", "body"),
    [
        ("run", {"argv": ["sh", "-c", "echo ä; echo e >&2; exit 2"], "stdin": "x", "timeout_s": 5}),
        ("run", {"argv": ["cat"], "stdin": "half \ud800"}),
        ("run", {"argv": ["true"], "cwd": "missing"}),
        ("run", {"argv": []}),
        ("run", {"argv": ["true"], "color": "red"}),
        ("run", {"argv": ["true"], "timeout_s": "5"}),
        ("run", ["true"]),
        ("run_python", {"code": "raise SystemExit(3)"}),
        ("run_python", {"code": "\0"}),
        ("run_python", {"code": 5}),
        ("run_shell", {"command": "echo \udfff | wc --bytes"}),
        ("run_shell", {}),
        ("run_ruby", {"code": "1"}),
    ],
)
async def test_quick_sessions_run_as_the_routes_do(client: httpx.AsyncClient, verb: str, body: Any) -> None:
    path = f"/sessions/{(await client.post('/sessions', json={})).json()['session_id']}/{verb}"
    sent = json.dumps(body).encode()
    quick, routed = [await client.post(path, content=sent, headers={"Content-Type": kind}) for kind in (QUICK, ROUTED)]
    assert comparable(quick) == comparable(routed)


PATHS = (
    "/sessions",
    "/sessions/",
    "/sessions?color=red",
    "/sessions/unknown/run_python",
    "/sessions//run",
    "/sessionsandmore",
    "/sessionsandmore/unknown/run_python",
)


async def test_quick_sessions_start_and_refuse_as_the_routes_do(client: httpx.AsyncClient) -> None:
    bodies = [b"{}", b'{"label": "a", "ttl_s": 60}', b'{"ttl_s": NaN}', b'{"ttl_s": 1e400}', b"{", b"", b'{"ttl": 1}']
    for body in [*bodies, b'{"image": "no/such:image"}', b'{"needs": {"own_root": true}}']:
        for path in PATHS:
            for given in ({}, {"Idempotency-Key": ""}, {"Idempotency-Key": "short"}, {"Idempotency-Key": "x" * 129}):
                replies = [
                    await client.post(path, content=body, headers={"Content-Type": kind, **given})
                    for kind in (QUICK, ROUTED)
                ]
                assert comparable(replies[0]) == comparable(replies[1]), (body, path, given)
                for reply in replies:
                    if reply.status_code == 200:
                        assert (await client.delete(f"/sessions/{reply.json()['session_id']}")).status_code == 204
    assert (await client.get("/sessions")).json() == []


def comparable(reply: httpx.Response) -> tuple[int, dict[str, str], Any]:
    """Status, headers and body, without the fields that differ from one session or run to the next."""
    kept = {name: reply.headers[name] for name in ("content-type", "retry-after") if name in reply.headers}
    body = reply.json() if reply.content else {}
    varying = {"session_id", "idle_s", "age_s", "duration_s"}
    return reply.status_code, kept, {name: value for name, value in body.items() if name not in varying}
