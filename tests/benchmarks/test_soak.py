"""The soak in small, and its look for what a run left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.soak import WEIGHTS, Memory
from benchmarks.support.left_behind import left_behind

Measure = Callable[..., Awaitable[dict[str, Any]]]
LISTENS = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"


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
    assert set(figures["memory"]) <= set(WEIGHTS)


def test_what_a_run_leaves_is_named(tmp_path: Path) -> None:
    root = tmp_path / f"soak-test-{os.getpid()}"
    root.mkdir()
    (root / "connect.env").touch()
    shared = Path("/dev", "shm", f"penstock-{root.name}-left")
    shared.mkdir()
    process = subprocess.Popen([sys.executable, "-c", LISTENS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
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
