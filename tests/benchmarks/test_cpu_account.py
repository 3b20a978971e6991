"""CPU seconds of a real run's processes, ended ones and boxes included."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from tests.living import alive

from benchmarks.support.cpu_account import CpuAccount, tree_cpu_s
from benchmarks.support.reaper import reaped

WORKER = """
import subprocess, sys
burn = "import time\\nwhile time.process_time() < 0.8: pass"
subprocess.run([sys.executable, "-c", burn], check=True)
input()
"""


def test_what_a_worker_starts_counts_as_boxes() -> None:
    command = [sys.executable, "-c", WORKER, "penstock.deploy.cli", "agent"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as worker:
        account = CpuAccount(worker.pid)
        deadline = time.monotonic() + 60
        while account.by_process().get("boxes", 0.0) < 0.5:
            assert time.monotonic() < deadline, account.by_process()
            account.look()
            time.sleep(0.05)
        worker.communicate(b"\n")
    account.look()
    assert set(account.by_process()) == {"agent workers", "boxes"}, "what was seen of an ended process is kept"


LEAVES_ONE = """
import subprocess, sys
burn = "import time\\nwhile time.process_time() < 0.8: pass"
subprocess.run(["sh", "-c", '"$0" -c "$1" &', sys.executable, burn], check=True)
input()
sys.exit(3)
"""


def test_what_its_own_parent_has_not_waited_for_counts_too() -> None:
    command = reaped([sys.executable, "-c", LEAVES_ONE, "penstock.deploy.cli", "run"])
    with subprocess.Popen(command, stdin=subprocess.PIPE) as run:
        account = CpuAccount(run.pid)
        _look_until(account, lambda: account.by_process().get("boxes", 0.0) > 0.5)
        assert tree_cpu_s(run.pid) > 0.5
        assert set(account.by_process()) == {"reaper", "supervisor", "boxes"}
        run.communicate(b"\n")
    assert run.returncode == 3


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


BOXES = """
import asyncio, os
from penstock.sandbox import SandboxConfig, make_sandbox

BURN = "import time\\nwhile time.process_time() < 0.5: pass"

async def use(sandbox, command):
    session = await sandbox.start("burns")
    result = await (session.run_python(BURN) if command is None else session.run(command))
    assert result.exit_code == 0, result
    await session.close()

def wait_for_the_test():
    print("ready", flush=True)
    input()

async def main():
    sandbox = make_sandbox(SandboxConfig(run_timeout_s=120, memory_unbounded=True), "account-%d" % os.getpid())
    await use(sandbox, ["true"])
    wait_for_the_test()
    for command in (None, ["python3", "-I", "-S", "-c", BURN]) * 3:
        await use(sandbox, command)
    wait_for_the_test()
    await sandbox.close()
    wait_for_the_test()

asyncio.run(main())
"""
BURNT_S = 6 * 0.5


@pytest.mark.bwrap
def test_what_forked_boxes_spend_is_in_the_account() -> None:
    """Of commands, which the box's first process waits for, and of an interpreter, which lives as long as its box."""
    command = reaped([sys.executable, "-c", BOXES, "penstock.deploy.cli", "agent"])
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as run:
        account = CpuAccount(run.pid)
        before = _boxes_when_ready(run, account)
        spent = _boxes_when_ready(run, account, before + BURNT_S) - before
        assert BURNT_S <= spent <= 1.15 * BURNT_S
        at_last = _boxes_when_ready(run, account)
        assert before + spent <= at_last <= before + spent + 0.15 * BURNT_S, "an ended zygote counts once"
        assert set(account.by_process()) == {"reaper", "agent workers", "boxes"}
    assert run.returncode == 0


def _boxes_when_ready(run: subprocess.Popen[bytes], account: CpuAccount, at_least_s: float = 0.0) -> float:
    """CPU seconds of boxes, as the program waits for a line, which it then gets.

    A box counts once its zygote has waited for it, a moment after its session was closed.
    """
    assert run.stdout is not None
    assert run.stdin is not None
    assert run.stdout.readline() == b"ready\n"
    account.look()
    deadline = time.monotonic() + 60
    while account.by_process()["boxes"] < at_least_s and time.monotonic() < deadline:
        time.sleep(0.05)  # no event says that a process has been waited for: its time appears in its parent's
        account.look()
    run.stdin.write(b"\n")
    run.stdin.flush()
    return account.by_process()["boxes"]


SERVER = """
import subprocess, sys
burn = "import time\\nwhile time.process_time() < %s: pass"
subprocess.run([sys.executable, "-c", burn % 0.8], check=True)
child = subprocess.Popen([sys.executable, "-c", burn % 0.4 + "\\ninput()", "vllm.EngineCore"], stdin=subprocess.PIPE)
input()
child.communicate(b"\\n")
input()
"""


def test_what_an_engine_starts_beside_engines_counts_as_its_helpers() -> None:
    command = [sys.executable, "-c", SERVER, "vllm.api_server"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as server:
        assert server.stdin is not None
        account = CpuAccount(server.pid)
        _look_until(account, lambda: account.by_process().get("engine helpers", 0.0) > 0.5)
        _look_until(account, lambda: account.by_process()["engine"] > 0.3)
        helpers = account.by_process()["engine helpers"]
        server.stdin.write(b"\n")
        server.stdin.flush()
        # An engine that ended is no helper. Until its parent has waited for it, its time is in no other's account.
        _look_until(account, lambda: account.by_process()["engine helpers"] == pytest.approx(helpers, abs=0.2))
        found = account.by_process()
        server.communicate(b"\n")
    assert set(found) == {"engine", "engine helpers"}


def _look_until(account: CpuAccount, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    account.look()
    while not condition():
        assert time.monotonic() < deadline, account.by_process()
        time.sleep(0.05)  # no event says that a process has been waited for: its time appears in its parent's
        account.look()
