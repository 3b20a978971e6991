from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from tests.sandbox.conftest import CONFIG, OWNER, box_cgroups, box_processes

from penstock.sandbox import BwrapSandbox, SandboxConfig, SandboxError, SandboxLost, make_sandbox

pytestmark = pytest.mark.bwrap


async def test_bwrap_boxes_do_not_see_each_other(sandbox: BwrapSandbox) -> None:
    one, other = await sandbox.start("one"), await sandbox.start("other")
    await one.write_file("secret", b"x")
    await one.run(["sh", "-c", "sleep 50 &"])
    seen = await other.run_python(
        "import os\nprint(os.path.exists('/tmp/secret'), os.getuid())\nos.system('ps -e | wc -l')"
    )
    uid = (await one.run_python("import os\nos.getuid()")).stdout.strip()
    assert seen.stdout.split()[0] == "False"
    assert seen.stdout.split()[1] != uid


async def test_bwrap_cpu_seconds_are_limited() -> None:
    sandbox = BwrapSandbox(CONFIG.model_copy(update={"cpu_s": 1}), OWNER)
    session = await sandbox.start("busy")
    result = await session.run_python("while True: pass", timeout_s=20.0)
    assert (result.exit_code, result.limit, result.state_lost) == (None, "cpu", True)
    await sandbox.close()


async def test_bwrap_closing_leaves_no_process_and_no_cgroup(sandbox: BwrapSandbox) -> None:
    sessions = [await sandbox.start(str(n)) for n in range(3)]
    await asyncio.gather(*(s.run(["sh", "-c", "setsid sleep 100 & sleep 0.01"]) for s in sessions))
    assert len(box_processes(os.getpid())) >= 3
    await sandbox.close()
    assert not box_processes(os.getpid())
    assert not box_cgroups(OWNER)


async def test_bwrap_box_ended_from_outside_is_lost(sandbox: BwrapSandbox) -> None:
    session = await sandbox.start("victim")
    call = asyncio.create_task(session.run_python("while True: pass", timeout_s=30.0))
    await asyncio.sleep(0.2)
    for process in box_processes(os.getpid()):
        os.kill(int(process.split()[0]), signal.SIGKILL)
    with pytest.raises(SandboxLost):
        await call
    with pytest.raises(SandboxLost):
        await session.run_python("1")


WORKER = """
import asyncio, sys
from penstock.sandbox import BwrapSandbox
from penstock.sandbox import SandboxConfig
async def main():
    sandbox = BwrapSandbox(SandboxConfig(), sys.argv[1])
    session = await sandbox.start("doomed")
    await session.run(["sh", "-c", "setsid sleep 1000 &"])
    print("running", flush=True)
    await session.run_python("while True: pass", timeout_s=600)
asyncio.run(main())
"""


@pytest.mark.crash
async def test_bwrap_boxes_end_with_a_killed_worker() -> None:
    owner = f"{OWNER}-killed"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WORKER, owner, stdout=asyncio.subprocess.PIPE, env=env
    )
    assert worker.stdout is not None
    assert await asyncio.wait_for(worker.stdout.readline(), 60) == b"running\n"
    assert box_processes(worker.pid)
    worker.kill()
    await worker.wait()
    deadline = time.monotonic() + 60
    while box_processes(worker.pid) and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    assert not box_processes(worker.pid)
    assert box_cgroups(owner)
    await BwrapSandbox(CONFIG, owner).close()
    assert not box_cgroups(owner)


async def test_bwrap_without_cgroups_rlimits_hold_and_it_is_said_aloud(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.sandbox.bwrap.open_cgroups", lambda *_: (None, "a test says so"))
    with caplog.at_level(logging.WARNING):
        sandbox = BwrapSandbox(CONFIG.model_copy(update={"pids": 16}), OWNER)
    assert "rlimits only" in caplog.text
    assert "a test says so" in sandbox.containment
    session = await sandbox.start("weaker")
    assert "MemoryError" in (await session.run_python("x = b'x' * (4 << 30)")).stderr
    bomb = "import os\nn = 0\nwhile n < 100:\n    if os.fork() == 0:\n        import time; time.sleep(50)\n    n += 1"
    assert "BlockingIOError" in (await session.run_python(bomb)).stderr
    await sandbox.close()


def test_bwrap_missing_bwrap_names_the_mend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="apt-get install bubblewrap"):
        make_sandbox(SandboxConfig(), "tests")


def test_bwrap_refused_namespaces_name_the_mend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    tmp_path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("penstock.sandbox.bwrap._as_uid", lambda _: [])
    with pytest.raises(SandboxError, match=r"No permissions.*user\.max_user_namespaces"):
        make_sandbox(SandboxConfig(), "tests")


def test_bwrap_remote_needs_a_url_and_a_token() -> None:
    with pytest.raises(SandboxError, match=r"sandbox\.url"):
        make_sandbox(SandboxConfig(backend="remote"), "tests", "token")
    with pytest.raises(SandboxError, match="token"):
        make_sandbox(SandboxConfig(backend="remote", url="http://127.0.0.1:1"), "tests")
