from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import mmap
import os
import signal
from pathlib import Path

import pytest
from tests.sandbox.conftest import CONFIG, OWNER, box_cgroups, box_processes, doomed_worker
from tests.sandbox.orphans import Maker, zygote_processes
from tests.until import until

from penstock.sandbox import BoxNeeds, SandboxConfig, SandboxError, SandboxLost, make_sandbox
from penstock.sandbox.bwrap.sandbox import BwrapSandbox

pytestmark = pytest.mark.bwrap
BY_UID = pytest.mark.skipif(os.geteuid() != 0, reason="a box's processes are found by its uid, which root alone gives")


@BY_UID
async def test_bwrap_closing_leaves_no_process_and_no_cgroup(sandbox: BwrapSandbox) -> None:
    sessions = [await sandbox.start(str(n)) for n in range(3)]
    await asyncio.gather(*(s.run(["sh", "-c", "setsid sleep 100 & sleep 0.01"]) for s in sessions))
    assert len(box_processes(os.getpid())) >= 3
    assert zygote_processes([Maker(os.getpid(), OWNER)])
    await sandbox.close()
    assert not box_processes(os.getpid())
    assert not zygote_processes([Maker(os.getpid(), OWNER)])
    assert not box_cgroups(OWNER)


@pytest.mark.parametrize("by", ["a zygote", "bwrap"])
async def test_bwrap_user_of_a_box_has_a_name(monkeypatch, by: str) -> None:
    if by == "bwrap":
        monkeypatch.setattr("penstock.sandbox.bwrap.sandbox.why_no_zygote", lambda *_: "a test says so")
    sandbox = BwrapSandbox(CONFIG, OWNER)
    try:
        session = await sandbox.start("names")
        assert (await session.run(["sh", "-c", "id -un; id -gn"])).stdout.split() == ["box", "box"]
    finally:
        await sandbox.close()


@BY_UID
async def test_bwrap_boxes_one_after_another_have_the_same_uid(sandbox: BwrapSandbox) -> None:
    uids = set()
    for _ in range(3):
        session = await sandbox.start("one")
        uids.add((await session.run(["cat", "/proc/self/uid_map"])).stdout)
        await session.close()
    assert len(uids) == 1


@BY_UID
async def test_bwrap_box_ended_from_outside_is_lost(sandbox: BwrapSandbox) -> None:
    session = await sandbox.start("victim")
    call = asyncio.create_task(session.run_python("while True: pass", timeout_s=300.0))
    await asyncio.sleep(0.2)
    for process in box_processes(os.getpid()):
        with contextlib.suppress(ProcessLookupError):  # the box's first process takes the others along
            os.kill(int(process.split()[0]), signal.SIGKILL)
    with pytest.raises(SandboxLost):
        await call
    with pytest.raises(SandboxLost):
        await session.run_python("1")


@pytest.mark.crash
async def test_bwrap_boxes_and_zygote_end_with_a_killed_worker() -> None:
    owner = f"{OWNER}-killed"
    worker = await doomed_worker(owner, SandboxConfig(memory_unbounded=True))
    maker = Maker(worker.pid, owner)
    assert len(zygote_processes([maker])) >= 3
    assert box_processes(worker.pid) or os.geteuid() != 0
    worker.kill()
    await worker.wait()
    await until(lambda: not zygote_processes([maker]) and not box_processes(worker.pid))
    assert box_cgroups(owner) or os.geteuid() != 0
    await BwrapSandbox(CONFIG, owner).close()
    assert not box_cgroups(owner)


def without_cgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.sandbox.bwrap.sandbox.open_cgroups", lambda *_: (None, "a test says so"))


async def test_bwrap_without_cgroups_counts_memory_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without_cgroups(monkeypatch)
    with caplog.at_level(logging.WARNING):
        sandbox = BwrapSandbox(CONFIG.model_copy(update={"pids": 16, "memory_mb": 96}), OWNER)
    assert "memory counted" in caplog.text
    assert "a test says so" in sandbox.containment
    session = await sandbox.start("weaker")
    assert "MemoryError" in (await session.run_python("x = b'x' * (4 << 30)")).stderr
    bomb = "import os\nn = 0\nwhile n < 100:\n    if os.fork() == 0:\n        import time; time.sleep(50)\n    n += 1"
    assert "BlockingIOError" in (await session.run_python(bomb)).stderr
    other = await sandbox.start("together")
    assert (await other.run_python(TOGETHER, timeout_s=300.0)).limit == "memory"
    assert (await other.run_python("40 + 2")).stdout == "42\n"
    await sandbox.close()


TOGETHER = """
import os, time
for _ in range(4):
    if os.fork() == 0: break
kept = bytes([1]) * (48 << 20)
time.sleep(1000)
"""


async def test_bwrap_files_over_the_memory_end_the_box(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that still runs could be ended to make room. Where the writer is ended at the limit, its files fit."""
    without_cgroups(monkeypatch)
    sandbox = BwrapSandbox(CONFIG.model_copy(update={"tmp_mb": 512, "memory_mb": 64}), OWNER)
    session = await sandbox.start("hoarder")
    result = await session.run(["dd", "if=/dev/zero", "of=/tmp/hoard", "bs=1M", "count=400"], timeout_s=300.0)
    left = await session.run(["du", "--summarize", "--block-size=1M", "/tmp"])
    await sandbox.close()
    assert result.limit == "memory"
    assert int(left.stdout.split()[0]) <= (0 if result.files_lost else 64)


async def test_bwrap_files_that_leave_no_room_for_a_program_end_the_box(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files fit, and no call could delete one: each would be ended at the limit."""
    without_cgroups(monkeypatch)
    sandbox = BwrapSandbox(CONFIG.model_copy(update={"tmp_mb": 512, "memory_mb": 64}), OWNER)
    session = await sandbox.start("crowded")
    append = ["sh", "-c", "head -c 256K /dev/zero >> /tmp/hoard && sleep 0.5"]
    await session.run(["dd", "if=/dev/zero", "of=/tmp/hoard", "bs=1M", "count=54"], timeout_s=300.0)
    calls = [await session.run(append, timeout_s=300.0)]
    while len(calls) < 60 and not calls[-1].files_lost:
        calls.append(await session.run(append, timeout_s=300.0))
    after = await session.run(append, timeout_s=300.0)
    await sandbox.close()
    assert [call.limit for call in calls] == [None] * (len(calls) - 1) + ["memory"]
    assert calls[-1].files_lost
    assert (after.exit_code, after.limit) == (0, None)


async def test_bwrap_a_large_program_may_start_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child of vfork() runs in its parent's memory: it is no second holder of it."""
    without_cgroups(monkeypatch)
    sandbox = BwrapSandbox(CONFIG.model_copy(update={"memory_mb": 128}), OWNER)
    session = await sandbox.start("large")
    code = "import subprocess\nkept = bytes([1]) * (80 << 20)\nfor _ in range(40): subprocess.run(['true'])"
    result = await session.run_python(code, timeout_s=300.0)
    assert (result.exit_code, result.limit) == (0, None)
    await sandbox.close()


def test_bwrap_unbounded_memory_is_refused_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    without_cgroups(monkeypatch)
    monkeypatch.setattr("penstock.sandbox.bwrap.sandbox.build_filter", lambda **_: None)
    with pytest.raises(SandboxError, match=r"a test says so.*sandbox\.memory_unbounded"):
        make_sandbox(SandboxConfig(), OWNER)
    allowed = make_sandbox(SandboxConfig(memory_unbounded=True), OWNER)
    assert isinstance(allowed, BwrapSandbox)
    assert "memory is limited per process, not per box" in allowed.containment


def test_bwrap_missing_bwrap_names_the_mend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="apt-get install bubblewrap"):
        make_sandbox(SandboxConfig(), "tests")


def test_bwrap_refused_namespaces_name_the_mend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    tmp_path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("penstock.sandbox.bwrap.sandbox._as_uid", lambda _: [])
    with pytest.raises(SandboxError, match=r"No permissions.*user\.max_user_namespaces"):
        make_sandbox(SandboxConfig(), "tests")


def test_bwrap_remote_needs_a_url_and_a_token() -> None:
    with pytest.raises(SandboxError, match=r"sandbox\.url"):
        make_sandbox(SandboxConfig(backend="remote"), "tests", "token")
    with pytest.raises(SandboxError, match="token"):
        make_sandbox(SandboxConfig(backend="remote", url="http://127.0.0.1:1"), "tests")


def cached_share(path: Path) -> float:
    """Share of a file's pages that are in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as pages:
        states = (ctypes.c_ubyte * -(-len(pages) // mmap.PAGESIZE))()
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(pages)), states) == 0
        return sum(state & 1 for state in states) / len(states)


@pytest.mark.parametrize("clean", [True, False])
async def test_bwrap_what_a_box_read_leaves_the_cache_with_it(tmp_path: Path, clean: bool) -> None:
    shared = tmp_path / "shared" / "file"
    shared.parent.mkdir()
    shared.write_bytes(os.urandom(8 << 20))
    with shared.open("r+b") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_share(shared) > 0:  # tmpfs: a file has no other place than the cache, so nothing can leave it
        pytest.skip(f"{tmp_path} is on a file system in memory, whose files never leave the cache")
    sandbox = BwrapSandbox(CONFIG.model_copy(update={"folders": {"/shared": str(shared.parent)}}), OWNER)
    try:
        if "cgroup v" not in sandbox.containment:
            pytest.skip(f"boxes have no cgroup here, whose end empties the cache: {sandbox.containment}")
        session = await sandbox.start("reads", needs=BoxNeeds(clean_cache=clean))
        assert (await session.run(["sh", "-c", "cat /shared/file | wc -c"])).stdout.split() == [str(8 << 20)]
        await session.close()
        left = cached_share(shared)
    finally:
        await sandbox.close()
    assert left < 0.1 if clean else left > 0.5
