"""Who asks for more than it may, or than there is, is told so and when to ask again; nothing was done then."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx
import pytest
from tests.sandbox.server.conftest import OTHER, UNTIL_GO, Start, gated, headers, remote_of

from penstock.sandbox import SandboxConfig
from penstock.sandbox.config import CallerConfig, SandboxServerConfig
from penstock.sandbox.protocol import SandboxBusy

pytestmark = pytest.mark.bwrap


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> SandboxConfig:
    """Two boxes; the other caller may have one, and one running call."""
    monkeypatch.setenv("OTHER_TOKEN", OTHER)
    callers = {"other": CallerConfig(token_env="OTHER_TOKEN", max_boxes=1, max_calls=1)}
    return SandboxConfig(max_boxes=2, server=SandboxServerConfig(callers=callers, queue_timeout_s=60.0))


async def test_quota_of_boxes_refuses_that_caller_alone(start: Start, config: SandboxConfig) -> None:
    url = await start(config)
    async with httpx.AsyncClient(base_url=url, headers=headers(OTHER), timeout=60) as other:
        first = (await other.post("/sessions", json={})).json()
        refused = await other.post("/sessions", json={})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json() == {"error": {"message": "other has 1 boxes, its quota"}}
        assert (await other.post("/sessions", json={}, headers=headers())).status_code == 200
        await other.delete(f"/sessions/{first['session_id']}")
        assert (await other.post("/sessions", json={})).status_code == 200
        assert 'penstock_sandbox_calls_total{outcome="refused",verb="start"} 1.0' in (await other.get("/metrics")).text


async def test_quota_of_calls_refuses_and_keeps_the_session(
    start: Start, config: SandboxConfig, tmp_path: Path
) -> None:
    url = await start(gated(config, tmp_path))
    async with httpx.AsyncClient(base_url=url, headers=headers(OTHER), timeout=300) as other:
        path = f"/sessions/{(await other.post('/sessions', json={})).json()['session_id']}"
        long = asyncio.create_task(other.post(f"{path}/run", json={"argv": UNTIL_GO, "timeout_s": 300.0}))
        async with asyncio.timeout(60):
            while [one["idle_s"] for one in (await other.get("/sessions")).json()] != [0.0]:  # it has begun
                await asyncio.sleep(0.01)
        for verb, body in (
            ("run", {"argv": ["true"]}),
            ("stream", {"argv": ["true"]}),
            ("run_shell", {"command": ":"}),
        ):
            refused = await other.post(f"{path}/{verb}", json=body)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1"), verb
        assert (await other.post("/run_code", json={"language": "bash", "code": ":"})).status_code == 429
        assert (await other.put(f"{path}/files", params={"path": "f"}, content=b"x")).status_code == 429
        (tmp_path / "go").touch()
        assert (await long).json()["exit_code"] == 0
        assert (await other.post(f"{path}/run", json={"argv": ["true"]})).json()["exit_code"] == 0


async def test_quota_queue_has_a_deadline_and_says_how_long_was_waited(start: Start, config: SandboxConfig) -> None:
    url = await start(config)
    async with httpx.AsyncClient(base_url=url, headers=headers(), timeout=60) as client:
        for _ in range(2):
            await client.post("/sessions", json={})
        refused = await client.post("/sessions", json={"wait_s": 0.1}, headers=headers(OTHER))
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert re.match(r"all 2 boxes were in use; waited \d+\.\d", refused.json()["error"]["message"])
        waiting = [asyncio.create_task(client.post("/sessions", json={}, headers=headers(OTHER)))]
        async with asyncio.timeout(60):
            while (await client.get("/health")).json()["waiting"] != 1:
                await asyncio.sleep(0.02)
        # the place in the queue is one of its boxes: nobody fills the queue
        assert (await client.post("/sessions", json={}, headers=headers(OTHER))).status_code == 429
        sessions = (await client.get("/sessions")).json()
        await client.delete(f"/sessions/{sessions[0]['session_id']}")
        assert (await waiting[0]).status_code == 200


async def test_quota_who_left_the_queue_gets_no_session(start: Start, config: SandboxConfig) -> None:
    url = await start(config)
    async with httpx.AsyncClient(base_url=url, headers=headers(), timeout=60) as client:
        held = [(await client.post("/sessions", json={})).json()["session_id"] for _ in range(2)]
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/sessions", json={}, timeout=3.0)
        for session_id in held:
            await client.delete(f"/sessions/{session_id}")
        async with asyncio.timeout(60):  # its turn comes, and its box is ended unused
            while 'penstock_sandbox_pool_boxes_total{how="taken_cold"} 3.0' not in (await client.get("/metrics")).text:
                await asyncio.sleep(0.02)
            while (await client.get("/health")).json()["waiting"] or (await client.get("/sessions")).json():
                await asyncio.sleep(0.02)


async def test_quota_client_waits_for_its_turn_and_gives_up_in_time(start: Start, config: SandboxConfig) -> None:
    url = await start(config)
    sandbox = remote_of(url, OTHER)
    first = await sandbox.start("first")
    second = asyncio.create_task(sandbox.start("second"))
    await asyncio.sleep(0.2)
    await first.close()
    session = await second
    assert (await session.run_python("2")).stdout == "2\n"
    sandbox.client.busy_timeout_s = 0.5
    with pytest.raises(SandboxBusy, match="other has 1 boxes") as refused:
        await sandbox.start("third")
    assert refused.value.after_s == 1.0
    await sandbox.close()
