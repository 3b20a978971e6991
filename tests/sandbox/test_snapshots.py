"""Copies of boxes: what a fork has, that branches are apart, and who refuses by name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
from tests.sandbox.backends import CONFIG, OWN_BOXES, on_every_backend, on_every_provider, sandbox_of

from penstock.sandbox import BoxNeeds, SandboxError, SandboxLost, make_sandbox
from penstock.sandbox.bwrap.sandbox import BwrapSandbox
from penstock.sandbox.protocol import ForkableSandbox, NoSnapshots, SandboxBusy, Snapshot
from penstock.sandbox.unsafe_subprocess import UnsafeSubprocessSandbox


@pytest_asyncio.fixture(params=OWN_BOXES)
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[ForkableSandbox]:
    async with sandbox_of(request.param) as made:
        yield made


@on_every_backend
async def test_fork_has_the_files_and_no_state(sandbox: ForkableSandbox) -> None:
    session = await sandbox.start("trunk")
    await session.run_python("x = 1")
    await session.run_shell("mkdir -p 'a b/c' && printf '\\0data' > 'a b/c/f' && chmod 750 'a b' && ln -s c 'a b/link'")
    await session.run(["chmod", "711", "."])  # its folder as such is the next box's own
    snapshot = await sandbox.snapshot(session)
    fork = await sandbox.fork(snapshot, "branch")
    assert await fork.read_file("a b/link/f") == b"\0data"
    assert (await fork.run(["stat", "-c", "%a %F", "a b", "a b/link"])).stdout == "750 directory\n777 symbolic link\n"
    assert (await fork.run(["stat", "-c", "%a", "."])).stdout != "711\n"
    assert "NameError" in (await fork.run_python("x")).stderr
    assert (await session.run_python("x")).stdout == "1\n"


@on_every_backend
async def test_branches_are_apart(sandbox: ForkableSandbox) -> None:
    trunk = await sandbox.start("trunk")
    await trunk.write_file("f", b"before")
    snapshot = await sandbox.snapshot(trunk)
    await trunk.write_file("f", b"after")
    one, two = [await sandbox.fork(snapshot, f"branch {number}") for number in range(2)]
    await one.write_file("f", b"one")
    read = [(await session.read_file("f")).decode() for session in (trunk, one, two)]
    assert read == ["after", "one", "before"]
    await trunk.close()
    again = await sandbox.snapshot(one)  # of a fork, and one whose trunk is gone
    assert await (await sandbox.fork(again, "twig")).read_file("f") == b"one"


async def test_forgotten_snapshot_is_lost(sandbox: ForkableSandbox) -> None:
    session = await sandbox.start("trunk")
    snapshot = await sandbox.snapshot(session)
    await sandbox.forget(snapshot)
    await sandbox.forget(snapshot)
    with pytest.raises(SandboxLost):
        await sandbox.fork(snapshot, "too late")
    await session.close()
    with pytest.raises(SandboxLost):
        await sandbox.snapshot(session)


async def test_snapshot_that_is_forgotten_while_a_fork_starts_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = UnsafeSubprocessSandbox(CONFIG)
    snapshot = await sandbox.snapshot(await sandbox.start("trunk"))
    start = sandbox.start

    async def start_slowly(*args: Any, **kwargs: Any) -> Any:
        session = await start(*args, **kwargs)
        await sandbox.forget(snapshot)
        return session

    monkeypatch.setattr(sandbox, "start", start_slowly)
    with pytest.raises(SandboxLost, match="forgotten"):
        await sandbox.fork(snapshot, "branch")
    assert len(sandbox._sessions) == 1, "the trunk"
    await sandbox.close()


@pytest.mark.bwrap
async def test_files_that_are_too_many_are_refused() -> None:
    sandbox = BwrapSandbox(CONFIG.model_copy(update={"tmp_mb": 256, "memory_mb": 512}), "tests")
    session = await sandbox.start("large")
    await session.run(["sh", "-c", "head -c 40000000 /dev/zero > large"])
    with pytest.raises(SandboxError, match="cannot be copied"):
        await sandbox.snapshot(session)
    assert (await session.run(["ls", "-A"])).stdout == "large\n"  # nothing of the attempt stays
    await sandbox.close()


@pytest.mark.bwrap
async def test_snapshot_on_a_full_disk_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = BwrapSandbox(CONFIG, "tests")
    session = await sandbox.start("trunk")
    full = partial(open, "/dev/full", "wb", 0)
    monkeypatch.setattr("penstock.sandbox.snapshots.tempfile.TemporaryFile", full)
    with pytest.raises(SandboxError, match=r"cannot be copied: .*No space left"):
        await sandbox.snapshot(session)
    monkeypatch.undo()
    await sandbox.close()


OWN_ROOTS = [
    pytest.param("bwrap", "/app", marks=pytest.mark.bwrap),
    pytest.param("docker", "/etc/app", marks=pytest.mark.docker),
    pytest.param("modal", "/srv/app", marks=pytest.mark.bwrap),
]
"""Backends whose boxes with a root of their own can be copied, and a folder outside of their /tmp."""


@on_every_provider
@pytest.mark.parametrize(("backend", "folder"), OWN_ROOTS)
async def test_own_root_is_copied_and_branches_are_apart(backend: str, folder: str) -> None:
    async with sandbox_of(backend, own_root=True) as sandbox:
        trunk = await sandbox.start("task", needs=BoxNeeds(own_root=True))
        await trunk.run(["sh", "-c", f"mkdir -p {folder} && echo before > {folder}/f && echo tmp > /tmp/g"])
        snapshot = await sandbox.snapshot(trunk)
        await trunk.run(["sh", "-c", f"echo after > {folder}/f"])
        branch = await sandbox.fork(snapshot, "branch")
        read = ["cat", f"{folder}/f", "/tmp/g"]
        assert (await branch.run(read)).stdout == "before\ntmp\n"
        await branch.run(["sh", "-c", f"echo branch > {folder}/f"])
        await sandbox.forget(snapshot)
        assert [(await session.run(read)).stdout for session in (trunk, branch)] == ["after\ntmp\n", "branch\ntmp\n"]
        twig = await sandbox.fork(await sandbox.snapshot(branch), "twig")
        assert (await twig.run(read)).stdout == "branch\ntmp\n"


async def test_snapshots_together_are_limited() -> None:
    sandbox = UnsafeSubprocessSandbox(CONFIG.model_copy(update={"snapshot_mb": 1}))
    session = await sandbox.start("trunk")
    await session.write_file("half", bytes(600_000))
    first = await sandbox.snapshot(session)
    with pytest.raises(SandboxBusy, match=r"sandbox\.snapshot_mb"):
        await sandbox.snapshot(session)
    await sandbox.forget(first)
    assert await (await sandbox.fork(await sandbox.snapshot(session), "branch")).read_file("half") == bytes(600_000)
    await sandbox.close()


async def test_backends_without_copies_refuse_by_name() -> None:
    sandbox = make_sandbox(CONFIG.model_copy(update={"backend": "remote", "url": "http://127.0.0.1:9"}), "tests", "t")
    with pytest.raises(NoSnapshots, match="remote"):
        await sandbox.fork(Snapshot("any"), "branch")  # type: ignore[attr-defined]
    await sandbox.close()
