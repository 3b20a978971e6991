"""CPU seconds of a program's processes, those that nobody waited for included."""

from __future__ import annotations

import subprocess
import sys
import time

from tests.living import alive

from benchmarks.support.reaper import reaped, tree_cpu_s

LEAVES_ONE = """
import subprocess, sys
burn = "import time\\nwhile time.process_time() < 0.8: pass"
subprocess.run(["sh", "-c", '"$0" -c "$1" &', sys.executable, burn], check=True)
input()
sys.exit(3)
"""


def test_cpu_of_a_process_whose_own_parent_has_not_waited_for_it_counts() -> None:
    with subprocess.Popen(reaped([sys.executable, "-c", LEAVES_ONE]), stdin=subprocess.PIPE) as run:
        deadline = time.monotonic() + 60
        looks = 0
        while looks < 5:  # in a row: it has ended by then, and still counts
            assert time.monotonic() < deadline
            looks = looks + 1 if tree_cpu_s(run.pid) >= 0.8 else 0
            time.sleep(0.1)
        run.communicate(b"\n")
    assert run.returncode == 3
    assert tree_cpu_s(run.pid) == 0.0


def test_a_command_ends_with_its_reaper() -> None:
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with subprocess.Popen(reaped([sys.executable, "-c", child]), stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        pid = int(run.stdout.readline())
        run.kill()
        run.wait()
        deadline = time.monotonic() + 60
        while alive(pid):
            assert time.monotonic() < deadline
            time.sleep(0.05)
