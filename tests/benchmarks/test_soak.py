"""The soak in small, and its look for what a run left behind."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.ports import free_port

from benchmarks.soak import WEIGHTS, Memory
from benchmarks.support.left_behind import left_behind
from benchmarks.support.soak_run import SoakRun
from penstock.deploy import RunConnection
from penstock.transfer_queue import Announcement, Limits, RedisServer

Measure = Callable[..., Awaitable[dict[str, Any]]]
LISTENS = "import socket, sys; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); print(flush=True); input()"


@pytest.mark.deep
@pytest.mark.redis
@pytest.mark.bwrap
@pytest.mark.torch
@pytest.mark.timeout(2700)
async def test_the_soak(measure: Measure) -> None:
    measured = await measure("soak", PENSTOCK_SOAK_MINUTES="1")
    figures = measured["figures"]
    assert [figures[name] for name in ("lost", "trained_twice", "token_mismatches")] == [0, 0, 0]
    assert (figures["left_behind"], figures["ended_by_itself"]) == ([], [])
    assert set(figures["kills"]) <= set(WEIGHTS)
    assert figures["kills"]
    assert figures["versions_seen"]
    assert figures["versions_with_two_contents"] == 0
    assert set(figures["memory"]) <= set(WEIGHTS)


def announced(version: int, checksum: str) -> Announcement:
    tensor = {"name": "w", "shape": [1], "dtype": "float32", "xxh3": checksum}
    fields = {"version": version, "transport": "disk", "path": f"/{checksum}", "bytes": 4, "tensors": [tensor]}
    return Announcement(version, fields)


@pytest.mark.redis
async def test_a_version_announced_with_other_values_is_counted(tmp_path: Path) -> None:
    run = SoakRun(tmp_path, f"soak-{secrets.token_hex(3)}")
    run.root.mkdir()
    await asyncio.to_thread(run.note_version)  # there is no run yet
    async with RedisServer(tmp_path / "redis", "a-test-password") as server:
        link = RunConnection(server.url, run.root.name, "a-test-password", "token")
        queue = await link.connect()
        await queue.create_run(Limits(group_size=2, groups_per_step=1, max_staleness=0), "name: soak")
        await queue.claim_training("a trainer")
        await queue.pass_step(0)
        (run.root / "connect.env").write_text(link.shell_lines())
        await asyncio.to_thread(run.note_version)
        assert run.contents == {}
        await queue.publish_version(announced(1, "aa"))
        await asyncio.to_thread(run.note_version)
        await queue.renew_manifest(announced(1, "aa"))  # written again
        await asyncio.to_thread(run.note_version)
        assert (len(run.contents), run.versions_with_two_contents()) == (1, 0)
        await queue.renew_manifest(announced(1, "bb"))
        await asyncio.to_thread(run.note_version)
        assert (len(run.contents), run.versions_with_two_contents()) == (1, 1)
        await queue.close()
    await asyncio.to_thread(run.note_version)  # its queue is away


def test_what_a_run_leaves_is_named(tmp_path: Path) -> None:
    root = tmp_path / f"soak-test-{os.getpid()}"
    root.mkdir()
    (root / "connect.env").touch()
    shared = Path("/dev", "shm", f"penstock-{root.name}-left")
    shared.mkdir()
    port = free_port()
    command = [sys.executable, "-c", LISTENS, str(port)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline()
        started = {process.pid: psutil.Process(process.pid).create_time()}
        left = left_behind(root, started, set(), {port})
        assert [line.partition(":")[0] for line in left] == [
            f"process {process.pid}",
            f"port {port} of process {process.pid}",
            f"shared memory {shared}",
            f"file {root / 'connect.env'}",
        ]
        process.send_signal(signal.SIGKILL)
        process.wait()
        shared.rmdir()
        (root / "connect.env").unlink()
        with socket.create_server(("127.0.0.1", port)):  # somebody else's now
            assert left_behind(root, started, set(), {port}) == []
    finally:
        process.kill()
        process.wait()
        if shared.exists():
            shared.rmdir()


def test_growth_of_memory_is_per_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("benchmarks.soak.time.monotonic", lambda: now[0])
    memory = Memory()
    for minute in range(4):
        now[0] = 60.0 * minute
        memory.add({"redis": [(90.0, 10_000_000 + 2_000_000 * minute), (50.0, 1)], "other": [(90.0, 5)]})
    assert memory.figures() == {"redis": {"mb": 13.0, "mb_per_min": 2.0, "looks": 4}}
