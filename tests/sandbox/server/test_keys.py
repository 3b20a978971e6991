"""Requests with a key: asked again, by whomever, they are answered and not done again."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from tests.sandbox.server.conftest import remote_of

from penstock.sandbox import RemoteSandbox, as_call

pytestmark = pytest.mark.bwrap


async def test_key_makes_a_repeated_call_run_once(url: str, remote: RemoteSandbox) -> None:
    other = remote_of(url)
    session = await remote.start("episode")
    await session.run_python("x = 0")
    with as_call("life/turn 1/call 0"):
        first = asyncio.create_task(session.run_python("import time; time.sleep(0.5); x += 1; x"))
    await asyncio.sleep(0.2)
    first.cancel()
    again = await other.attach(session.session_id)
    with as_call("life/turn 1/call 0"):
        assert (await again.run_python("import time; time.sleep(0.5); x += 1; x")).stdout == "1\n"
    with as_call("life/turn 1/call 1"):
        assert (await again.run_python("x")).stdout == "1\n"
    await other.close()


async def test_key_start_with_key_of_living_session_gives_that_one(client: httpx.AsyncClient) -> None:
    key = {"Idempotency-Key": "episode-1-start"}
    first, second = [(await client.post("/sessions", json={}, headers=key)).json()["session_id"] for _ in range(2)]
    assert first == second
    await client.delete(f"/sessions/{first}")
    third = (await client.post("/sessions", json={}, headers=key)).json()["session_id"]
    assert third != first
    refused = await client.post("/sessions", json={}, headers={"Idempotency-Key": "short"})
    assert refused.status_code == 422
