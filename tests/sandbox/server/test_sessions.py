"""Sessions over HTTP: they live on without their opener, and end when nobody uses them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import pytest
from tests.sandbox.server.conftest import CONFIG, OTHER, TOKEN, UNTIL_GO, Start, gated, headers, remote_of, serving
from tests.until import until

from penstock.sandbox import RemoteSandbox, SandboxConfig, SandboxError, SandboxLost, as_call, make_sandbox
from penstock.sandbox.config import CallerConfig, SandboxServerConfig
from penstock.sandbox.remote import TTL_HEADROOM_S
from penstock.sandbox.server import SandboxMetrics, build_app, serve
from penstock.sandbox.server.callers import callers_of
from penstock.testing import FakeSandbox

pytestmark = pytest.mark.bwrap

OPENER = """
import asyncio, sys
from penstock.sandbox import SandboxConfig
from penstock.sandbox import RemoteSandbox

async def main(url, token):
    sandbox = RemoteSandbox(SandboxConfig(backend="remote", url=url), url, token)
    session = await sandbox.start("run/episode 1")
    await session.run_python("x = 41")
    await session.run_shell("mkdir -p work && cd work && Y=7; f() { echo f$1; }")
    print(session.session_id, flush=True)
    waits = "import os, time\\nwhile not os.path.exists('/gate/go'): time.sleep(0.05)\\nx += 1"
    await session.run_python(waits, timeout_s=300.0)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_sessions_outlive_a_killed_worker_with_their_state(start: Start, tmp_path: Path) -> None:
    url = await start(gated(CONFIG, tmp_path))
    command = [sys.executable, "-c", OPENER, url, TOKEN]
    opener = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert opener.stdout is not None
    session_id = (await asyncio.wait_for(opener.stdout.readline(), 200)).decode().strip()
    await in_use(url)
    opener.send_signal(signal.SIGKILL)
    await opener.wait()

    (tmp_path / "go").touch()
    remote = remote_of(url)
    again = await remote.attach(session_id)
    assert (await again.run_python("x")).stdout == "42\n"  # what was asked for ran once, to its end
    assert (await again.run_shell("echo ${PWD##*/} $Y; f 3")).stdout == "work 7\nf3\n"
    await again.close()
    with pytest.raises(SandboxLost):
        await again.run_python("x")
    with pytest.raises(SandboxLost):
        await remote.attach(session_id)
    await remote.close()


async def in_use(url: str) -> None:
    """A call of the one session there is has begun."""
    async with httpx.AsyncClient(base_url=url, headers=headers(), timeout=60) as client, asyncio.timeout(200):
        while [one["idle_s"] for one in (await client.get("/sessions")).json()] != [0.0]:
            await asyncio.sleep(0.01)


async def test_sessions_errors_keep_their_kind(url: str, remote: RemoteSandbox) -> None:
    session = await remote.start("errors")
    assert (await session.run_python("1 / 0")).exit_code == 1
    with pytest.raises(FileNotFoundError):
        await session.read_file("../../etc/shadow")
    with pytest.raises(SandboxError, match="timeout_s"):
        await session.run_python("1", timeout_s=-1.0)
    with pytest.raises(SandboxError, match=r"python:3.*docker"):
        await remote.start("x", image="python:3")
    stranger = remote_of(url, token="wrong")
    with pytest.raises(SandboxError, match="refuses this token"):
        await stranger.start("x")
    nowhere = remote_of("http://127.0.0.1:9")
    with pytest.raises(SandboxError, match=r"127\.0\.0\.1:9"):
        await nowhere.start("x")
    await stranger.close()
    await nowhere.close()


async def test_sessions_end_after_their_time_without_use(start: Start, tmp_path: Path) -> None:
    url = await start(gated(CONFIG, tmp_path))
    sandbox = remote_of(url, ttl_s=10.0)
    busy = await sandbox.start("busy")
    work = asyncio.create_task(busy.run(UNTIL_GO, timeout_s=300.0))
    await in_use(url)
    forgotten = await sandbox.start("forgotten")
    async with httpx.AsyncClient(base_url=url, headers=headers(), timeout=60) as client:
        async with asyncio.timeout(200):
            while len((await client.get("/sessions")).json()) > 1:
                await asyncio.sleep(0.05)
        assert [one["label"] for one in (await client.get("/sessions")).json()] == ["busy"]
        assert "penstock_sandbox_reaped_total 1.0" in (await client.get("/metrics")).text
    with pytest.raises(SandboxLost):
        await forgotten.run_python("1")
    (tmp_path / "go").touch()
    assert (await work).exit_code == 0
    await sandbox.close()


async def test_sessions_get_the_ttl_of_an_episode_and_headroom(client: httpx.AsyncClient, url: str) -> None:
    config = SandboxConfig(backend="remote", url=url)
    for deadline_s, ttl_s in ((120.0, 120.0 + TTL_HEADROOM_S), (1e6, 86400.0)):
        sandbox = make_sandbox(config, "worker", TOKEN, episode_deadline_s=deadline_s)
        session = await sandbox.start("episode")
        assert (await client.get(f"/sessions/{session.session_id}")).json()["ttl_s"] == ttl_s
        await session.close()
        await sandbox.close()


async def test_sessions_are_listed_and_ended_by_label(client: httpx.AsyncClient) -> None:
    for label in ("old/1", "old/2", "new/1"):
        await client.post("/sessions", json={"label": label})
    listed = (await client.get("/sessions", params={"label": "old/"})).json()
    assert [one["label"] for one in listed] == ["old/1", "old/2"]
    assert (await client.delete("/sessions", params={"label": "old/"})).json() == {"ended": 2}
    assert [one["label"] for one in (await client.get("/sessions")).json()] == ["new/1"]
    gone = await client.get(f"/sessions/{listed[0]['session_id']}")
    assert (gone.status_code, set(gone.json()["error"])) == (404, {"message"})
    assert (await client.delete(f"/sessions/{listed[0]['session_id']}")).status_code == 204


async def test_sessions_session_is_its_openers_alone(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER_TOKEN", OTHER)
    callers = {"other": CallerConfig(token_env="OTHER_TOKEN")}
    url = await start(SandboxConfig(max_boxes=2, server=SandboxServerConfig(callers=callers)))
    ours, theirs = remote_of(url), remote_of(url, OTHER)
    session = await ours.start("ours")
    with pytest.raises(SandboxLost):
        await theirs.attach(session.session_id)
    async with httpx.AsyncClient(base_url=url, headers=headers(OTHER)) as client:
        assert (await client.get("/sessions")).json() == []
        assert (await client.delete(f"/sessions/{session.session_id}")).status_code == 204
        assert (await client.delete("/sessions", params={"label": ""})).json() == {"ended": 0}
    assert (await session.run_python("1")).stdout == "1\n"
    await ours.close()
    await theirs.close()


async def test_sessions_what_keeps_a_server_from_starting_is_said(url: str) -> None:
    with pytest.raises(SandboxError, match="choose another"):
        await serve(SandboxConfig(), "127.0.0.1", int(url.rpartition(":")[2]), TOKEN)
    with pytest.raises(SandboxError, match="needs a token"):
        callers_of(SandboxConfig(), "", {})
    one = SandboxConfig(server=SandboxServerConfig(callers={"a": CallerConfig(token_env="A")}))
    with pytest.raises(SandboxError, match=r"callers\.a: A is not set"):
        callers_of(one, TOKEN, {})
    with pytest.raises(SandboxError, match="its own token"):
        callers_of(one, TOKEN, {"A": TOKEN})


async def test_sessions_server_that_is_told_to_stop_ends_its_boxes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = SandboxConfig(backend="unsafe_subprocess", max_boxes=2, server=SandboxServerConfig(warm={"default": 1}))
    async with serving(config) as url:
        sandbox = remote_of(url)
        session = await sandbox.start("x")
        pid = int((await session.run_python("import os; os.getpid()")).stdout)
        assert list(tmp_path.glob("penstock-unsafe-*"))
        await sandbox.close()
    assert not list(tmp_path.glob("penstock-unsafe-*"))
    await until(lambda: not is_running(pid))


def is_running(pid: int) -> bool:
    """False also for a zombie that its parent has not read yet."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


async def test_sessions_repeat_the_result_of_a_repeated_call(url: str) -> None:
    """As the next owner of an episode asks: another client, the same names of calls."""

    async def one_call(sandbox: RemoteSandbox) -> tuple[str, str, bytes]:
        with as_call("episode 1/first call"):
            session = await sandbox.start("repeated")
            await session.write_file("log", b"a")
            ran = await session.run(["sh", "-c", "echo b >> log; cat log"])
            return session.session_id, ran.stdout, await session.read_file("log")

    first, second = remote_of(url), remote_of(url)
    told = await one_call(first)
    assert told[1:] == ("ab\n", b"ab\n")
    assert await one_call(second) == told
    with as_call("episode 1/second call"):
        session = await second.attach(told[0])
        assert (await session.run(["sh", "-c", "echo b >> log; cat log"])).stdout == "ab\nb\n"
        await session.close()
    assert (await one_call(second))[0] != told[0]  # that session is over: a fresh one
    await first.close()
    await second.close()


async def test_sessions_start_with_the_key_of_a_living_session_gives_that_one(client: httpx.AsyncClient) -> None:
    key = {"Idempotency-Key": "episode-1-start"}
    first, second = [(await client.post("/sessions", json={}, headers=key)).json()["session_id"] for _ in range(2)]
    assert first == second
    await client.delete(f"/sessions/{first}")
    third = (await client.post("/sessions", json={}, headers=key)).json()["session_id"]
    assert third != first
    refused = await client.post("/sessions", json={}, headers={"Idempotency-Key": "short"})
    assert refused.status_code == 422


# ---- output as it comes

SLOWLY = "echo one; sleep 0.7; echo two > done"


async def test_stream_reader_that_leaves_stops_no_run(remote: RemoteSandbox) -> None:
    session = await remote.start("leaver")
    await session.run_python("x = 5")
    stream = session.stream(["sh", "-c", SLOWLY], timeout_s=60.0)
    assert (await anext(stream)).data == "one\n"
    await stream.aclose()  # type: ignore[attr-defined]
    other = await remote.attach(session.session_id)
    assert (await other.run_python("x")).stdout == "5\n"  # it waited for its turn
    assert await other.read_file("done") == b"two\n"


async def test_stream_reader_that_leaves_ends_its_own_box() -> None:
    sandbox = make_sandbox(SandboxConfig(max_boxes=1), "tests")
    session = await sandbox.start("leaver")
    stream = session.stream(["sh", "-c", "echo one; exec sleep 600"], timeout_s=600.0)
    assert (await anext(stream)).data == "one\n"
    await stream.aclose()  # type: ignore[attr-defined]
    after = await session.run(["ls"])
    assert (after.stdout, after.files_lost) == ("", True)
    await sandbox.close()


async def test_stream_refusals_come_before_the_first_line(remote: RemoteSandbox, client: httpx.AsyncClient) -> None:
    session = await remote.start("refusals")
    path = f"/sessions/{session.session_id}/stream"
    assert (await client.post(path, json={"argv": []})).status_code == 422
    assert (await client.post("/sessions/none/stream", json={"argv": ["true"]})).status_code == 404
    answer = await client.post(path, json={"argv": ["echo", "a"]})
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = answer.text.splitlines()
    assert lines[0] == '{"stream":"stdout","data":"a\\n"}'
    assert lines[1].startswith('{"result":{"stdout":"a\\n","stderr":"","exit_code":0,')
    await session.close()
    with pytest.raises(SandboxLost):
        [piece async for piece in session.stream(["true"])]


# ---- metrics


async def test_metrics_token_for_metrics_opens_them_alone() -> None:
    app = build_app(FakeSandbox(), SandboxConfig(max_boxes=4), "the run's", "for metrics")
    headers = {"Authorization": "Bearer for metrics"}
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as http:
        found = await http.get("/metrics")
        assert (found.status_code, "penstock_sandbox_waiting 0.0" in found.text) == (200, True)
        assert (await http.get("/health")).status_code == 401
        assert (await http.post("/sessions", json={})).status_code == 401
        assert (await http.get("/metrics", headers={"Authorization": "Bearer "})).status_code == 401


def test_metrics_count_boxes_once() -> None:
    metrics = SandboxMetrics()
    for counts in ({"taken_warm": 2}, {"taken_warm": 2}, {"taken_warm": 3, "stale": 1}):
        metrics.count_boxes(counts)
    value = metrics.registry.get_sample_value
    assert value("penstock_sandbox_pool_boxes_total", {"how": "taken_warm"}) == 3
    assert value("penstock_sandbox_pool_boxes_total", {"how": "stale"}) == 1
