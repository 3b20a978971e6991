"""`penstock doctor --join`: who reaches whom in a living run, on a real Redis and a real sidecar."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.dashboard.living_run import LivingRun
from tests.deploy.preflight.preflight_support import RECIPE
from tests.ports import free_port
from tests.rollout_server.conftest import small_config
from typer.testing import CliRunner

from penstock.deploy import RunConfig, RunConnection, app, dump_config, limits_of, load_config
from penstock.deploy.preflight.check import Check
from penstock.deploy.preflight.running_run import check_run
from penstock.rollout_server import ServerJob, serve
from penstock.testing import FakeEngine
from penstock.transfer_queue import (
    Announcement,
    RedisServer,
    RedisTransferQueue,
    RunContext,
    ServerInfo,
    TransferQueue,
    TransferQueueConfig,
)

pytestmark = [pytest.mark.redis, pytest.mark.torch]
PASSWORD, TOKEN = "only-for-this-test", "of-this-run"
CONFIG = load_config(RECIPE, ["name=mine"])


@pytest.fixture
async def link(tmp_path: Path) -> AsyncIterator[RunConnection]:
    async with RedisServer(tmp_path / "redis", PASSWORD) as redis:
        yield RunConnection(redis.url, "mine", PASSWORD, TOKEN)


@pytest.fixture
async def queue(link: RunConnection) -> AsyncIterator[RedisTransferQueue]:
    queue = await link.connect(TransferQueueConfig())
    await queue.create_run(limits_of(CONFIG), dump_config(CONFIG))
    yield queue
    await queue.close()


@pytest.fixture
async def server(queue: RedisTransferQueue, tmp_path: Path) -> AsyncIterator[None]:
    async with served(queue, tmp_path, TOKEN):
        yield


@contextlib.asynccontextmanager
async def served(queue: TransferQueue, folder: Path, token: str) -> AsyncIterator[None]:
    """One sidecar with a fake engine, registered while this is open."""
    job = ServerJob("s0", RunContext(queue, "fake", token), small_config(), folder, drain_s=1)
    task = asyncio.create_task(serve(job, FakeEngine))
    async with asyncio.timeout(60):
        while not any(one.server_id == "s0" for one in await queue.servers()):
            await asyncio.sleep(0.02)
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def asked(link: RunConnection, config: RunConfig = CONFIG) -> dict[str, Check]:
    return {check.name: check for check in await check_run(link, config)}


@pytest.mark.usefixtures("server")
async def test_everybody_reaches_everybody(link: RunConnection) -> None:
    found = await asked(link)
    assert [check for check in found.values() if not check.ok and check.name != "redis memory"] == []
    names = {"redis", "clock", "queue", "server s0", "server s0 → queue", "server s0 → weights"}
    assert names <= set(found)

    found = (await asked(replace(link, token="of another run")))["server s0"]
    assert (found.ok, "PENSTOCK_TOKEN" in found.fix) == (False, True)


async def test_without_servers_and_with_one_that_cannot_be_reached(
    link: RunConnection, queue: RedisTransferQueue
) -> None:
    none = (await asked(link))["servers"]
    assert (none.verdict, "penstock rollout" in none.fix) == ("warn", True)
    await queue.heartbeat(ServerInfo("far", f"http://127.0.0.1:{free_port()}", 0))
    found = (await asked(link))["server far"]
    assert not found.ok
    assert "reach its port" in found.fix


async def test_a_server_whose_answer_never_ends_is_given_up(
    link: RunConnection, queue: RedisTransferQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.deploy.preflight.running_run.ANSWER_DEADLINE_S", 2.0)

    async def drip(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"1\r\n \r\n")
            await asyncio.sleep(0.1)

    async with await asyncio.start_server(drip, "127.0.0.1", 0) as listening, asyncio.timeout(60):
        port = listening.sockets[0].getsockname()[1]
        await queue.heartbeat(ServerInfo("slow", f"http://127.0.0.1:{port}", 0))
        found = (await asked(link))["server slow"]
    assert not found.ok
    assert "TimeoutError" in found.found


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
async def test_a_server_whose_certificate_the_system_trusts_is_reached(
    link: RunConnection, queue: RedisTransferQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    options = (
        "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=test -addext subjectAltName=IP:127.0.0.1"
    )
    command = ["openssl", "req", "-x509", *options.split(), "-keyout", str(key), "-out", str(certificate)]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True, timeout=60)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 11\r\nConnection: close\r\n\r\n{"ok":true}')
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context) as listening:
        url = f"https://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        await queue.heartbeat(ServerInfo("closed", url, 0))
        assert (await asked(link))["server closed"].ok


async def test_weights_that_this_machine_cannot_fetch(link: RunConnection, queue: RedisTransferQueue) -> None:
    manifest = {"transport": "http", "url": f"http://127.0.0.1:{free_port()}/weights-00000000.safetensors"}
    assert await queue.renew_manifest(Announcement(0, manifest))
    found = (await asked(link))["weights"]
    assert not found.ok
    assert "rollout.weights_host" in found.fix


async def test_weights_that_a_server_cannot_fetch(tmp_path: Path) -> None:
    """Published at an address that leads nowhere, as behind a firewall: the server is asked to fetch, and says so."""
    from penstock.weight_sync import ChainFile, Manifest

    async with LivingRun(tmp_path / "runs", "mine") as run:
        run.beating.cancel()
        link = RunConnection.from_lines((run.root / "connect.env").read_text())
        url = f"http://127.0.0.1:{free_port()}/weights-00000001.safetensors"
        async with served(run.queue, tmp_path, link.token):
            file = ChainFile(1, None, url, 10, "0" * 16, "0" * 16)
            await run.train(Manifest("http", (file,), ()).as_dict())
            found = await asked(link)
        assert not found["server s0 → weights"].ok, found
        assert "weights_host" in found["server s0 → weights"].fix


async def test_a_wrong_login_ends_it_there(link: RunConnection, queue: RedisTransferQueue) -> None:
    found = await asked(replace(link, password="somebody-elses"))
    assert list(found) == ["redis"]
    assert "PENSTOCK_REDIS_PASSWORD" in found["redis"].fix


@pytest.mark.bwrap
@pytest.mark.usefixtures("server")
async def test_the_command_asks_the_run_that_the_shell_names(
    link: RunConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in link.environment().items():
        monkeypatch.setenv(name, value)
    result = await asyncio.to_thread(CliRunner().invoke, app, ["doctor", "--join", "--json"])
    told = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert told["server s0"]["ok"], told
    assert told["chat template"]["ok"], "the model that the queue names is checked, too"
