"""Servers that start at the same time: one profiles a GPU after the other, as an engine that shares it must."""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.rollout_server.conftest import small_config

from penstock.common import FileLock
from penstock.common.device_locks import until_up
from penstock.rollout_server import EngineError, engine_logs, up_file
from penstock.rollout_server.engines.http.event_client import EngineAddress
from penstock.rollout_server.engines.http.server_process import ChildServer, Installation
from penstock.rollout_server.engines.vllm.server import VLLM

PROFILING = """
import http.server, os, socketserver, sys, time
device, socket = sys.argv[1:]
os.close(os.open(device, os.O_CREAT | os.O_EXCL))  # fails where another server profiles the device
time.sleep(0.3)
os.unlink(device)

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def address_string(self):
        return ""

class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    pass

Server(socket, Health).serve_forever()
"""


class Profiling(ChildServer):
    product, ready_path = VLLM, "/health"
    cpu = False
    device = Path()

    async def find_installation(self) -> Installation:
        return Installation(sys.executable, "0.32.0", cpu=self.cpu)

    def prepare(self, installation: Installation) -> Any:
        socket = str(self.folder / "http.sock")
        return (
            EngineAddress("http://vllm", "key", socket),
            [sys.executable, "-c", PROFILING, str(self.device), socket],
            {},
        )


@pytest.fixture(autouse=True)
def one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "model").mkdir()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with tempfile.TemporaryDirectory(prefix="p") as short:  # the path of a unix socket has 107 characters at most
        monkeypatch.setattr("tempfile.tempdir", short)
        yield


def new_server(folder: Path, name: str) -> Profiling:
    server = Profiling(small_config(start_timeout_s=300), str(folder / "model"), engine_logs(folder, name), 0)
    server.device = folder / "device"
    return server


async def test_servers_of_one_device_profile_it_one_after_the_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    servers = [new_server(tmp_path, f"rollout-{number}") for number in range(3)]
    with caplog.at_level(logging.INFO):
        await asyncio.gather(*(server.start() for server in servers))
    assert all(server.alive for server in servers)
    assert "loads a model onto GPU 0" in caplog.text
    await asyncio.gather(*(server.stop() for server in servers))


async def test_a_start_that_fails_makes_room_for_the_next(tmp_path: Path) -> None:
    server = new_server(tmp_path, "rollout-0")
    server.device.touch()
    with pytest.raises(EngineError, match="ended while it started"):
        await server.start()
    server.device.unlink()
    await server.start()
    await server.stop()


async def test_a_server_whose_folder_of_logs_is_anothers_fails_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.rollout_server.engines.http.server_process.UP_S", 0.0)
    server = new_server(tmp_path, "rollout-0")
    file = up_file(engine_logs(tmp_path, "rollout-0"))
    file.parent.mkdir(parents=True)
    with FileLock(file, ""), pytest.raises(EngineError, match="another server has this folder of logs"):
        await server.start()
    assert not server.alive


async def test_a_trainer_waits_for_the_engines_of_its_devices(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = new_server(tmp_path, "rollout-0")
    file = up_file(engine_logs(tmp_path, "rollout-0"))
    with caplog.at_level(logging.INFO):
        waiting = asyncio.create_task(until_up([file], 300))
        await asyncio.sleep(0)
        assert not waiting.done()
        await server.start()
        await waiting
    assert str(file) in caplog.text
    await server.stop()
    await until_up([file], 0)
    assert "not up after 0 s" in caplog.text
