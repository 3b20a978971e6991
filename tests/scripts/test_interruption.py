"""Interrupts a pytest that runs as scripts/test runs it, by one signal that its shell had it ignore."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.living import alive
from tests.until import until_in_threads

ROOT = Path(__file__).parents[2]
TESTS = """
import subprocess, sys, time
from pathlib import Path

import pytest

HERE = Path(__file__).parent

@pytest.fixture
def torn_down():
    yield
    (HERE / "torn down").touch()

def test_fails():
    assert "a wrong" == "answer"

def test_waits(torn_down):
    daemon = subprocess.Popen(
        [sys.executable, HERE / "daemon.py"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    (HERE / "written").write_text(f"{daemon.pid} {daemon.stdout.readline()}")
    (HERE / "written").rename(HERE / "left")
    time.sleep(600)
"""
DAEMON = """
import signal, time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory

signal.signal(signal.SIGTERM, signal.SIG_IGN)
shared = SharedMemory(create=True, size=4096)
resource_tracker.unregister(shared._name, "shared_memory")
print(shared.name, flush=True)
time.sleep(600)
"""
"""Ends only by SIGKILL, and leaves shared memory."""


@pytest.mark.parametrize("workers", [(), ("-n", "2", "--dist", "loadgroup")], ids=["alone", "workers"])
def test_one_interrupt_prints_the_summary_and_leaves_nothing(tmp_path: Path, workers: tuple[str, ...]) -> None:
    (tmp_path / "test_tiny.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    # As a shell does for what runs in the background.
    ignore = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv(sys.executable, sys.argv[1:])"
    )
    python = [sys.executable, "-c", ignore, sys.executable]
    command = [*python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), *workers]
    (tmp_path / "daemon.py").write_text(DAEMON)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**outer, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    with (tmp_path / "output").open("w") as output:
        run = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        until_in_threads(
            lambda: (
                run.poll() is not None
                or (
                    (tmp_path / "left").exists()
                    and "FAILED test_tiny.py::test_fails" in (tmp_path / "output").read_text()
                )
            )
        )
        run.send_signal(signal.SIGINT)
        assert run.wait(200) == pytest.ExitCode.INTERRUPTED, (tmp_path / "output").read_text()
    finally:
        run.kill()
        run.wait()
    printed = (tmp_path / "output").read_text()
    assert "short test summary info" in printed, printed
    assert "FAILED test_tiny.py::test_fails" in printed.rpartition("short test summary info")[2], printed
    assert "FAILED test_tiny.py::test_waits" not in printed, "a test that was broken off has not failed"
    assert (tmp_path / "torn down").exists()
    daemon, shared = (tmp_path / "left").read_text().split()
    assert not alive(int(daemon))
    assert not Path("/dev/shm", shared).exists()
