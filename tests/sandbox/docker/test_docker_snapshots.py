"""Copies of containers with a root of their own: what an image of one holds, its limits, and that none is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.sandbox.conftest import DOCKER, OWNER, doomed_worker, opened
from tests.sandbox.containers import (
    IMAGE,
    LAYERED_IMAGE,
    MANY_LAYERS,
    VOLUME_IMAGE,
    containers_of,
    docker,
    images_of,
    make_layered_image,
    make_volume_image,
)
from tests.until import until
from typer.testing import CliRunner

from penstock.deploy import app
from penstock.sandbox import BoxNeeds, SandboxError, SandboxLost, Session
from penstock.sandbox.docker.orphans import image_is_abandoned, labels_of
from penstock.sandbox.docker.sandbox import DockerSandbox
from penstock.sandbox.protocol import NoSnapshots, SandboxBusy, Snapshot

pytestmark = pytest.mark.docker
ROOT = BoxNeeds(own_root=True)
COPIED = {"own_root": True, "run_timeout_s": 30.0}


@pytest_asyncio.fixture
async def boxes() -> AsyncIterator[DockerSandbox]:
    async with opened(**COPIED) as sandbox:
        yield sandbox


async def shell(session: Session, command: str) -> str:
    result = await session.run(["sh", "-c", command])
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


MAKE = """set -e
mkdir /etc/mine && echo one > /etc/mine/f && chown -R 1234:1234 /etc/mine && chmod 750 /etc/mine
rm /usr/bin/git
echo two > /data/f && chown 1234 /data/f /data && chmod 700 /data
echo three > /dev/shm/f
"""
LOOK = "stat -c '%n %u %a' /etc/mine /data /data/f; cat /etc/mine/f /data/f; ls /usr/bin/git /dev/shm/f 2>&1 | wc -l"
MADE = "/etc/mine 1234 750\n/data 1234 700\n/data/f 1234 644\none\ntwo\n2\n"


async def test_commit_has_all_files_and_volumes(boxes: DockerSandbox) -> None:
    make_volume_image()
    trunk = await boxes.start("trunk", image=VOLUME_IMAGE, needs=ROOT)
    await shell(trunk, MAKE)
    await trunk.run_shell("cd /etc; sleep 100 &")
    branch = await boxes.fork(await boxes.snapshot(trunk), "branch")
    assert await shell(branch, LOOK) == MADE
    sleeping = "cat /proc/[0-9]*/comm 2>/dev/null | grep -c '^sleep$' || true"
    assert await shell(branch, f"echo $PENSTOCK_WORKDIR $GREETING; {sleeping}") == "/work hello\n0\n"
    assert await shell(trunk, sleeping) == "1\n"
    assert (await trunk.run_shell("pwd")).stdout == "/etc\n"  # and runs on where it was


@pytest.mark.deep
async def test_volumes_of_boxes_without_root_are_copied(boxes: DockerSandbox) -> None:
    make_volume_image()
    trunk = await boxes.start("trunk", image=VOLUME_IMAGE)
    await shell(trunk, "echo made > /data/f")
    branch = await boxes.fork(await boxes.snapshot(trunk), "branch")
    assert await shell(branch, "cat /data/f; echo more >> /data/f") == "made\n"
    assert not images_of(OWNER)


async def test_images_end_with_their_last_use(boxes: DockerSandbox) -> None:
    trunk = await boxes.start("trunk", needs=ROOT)
    first = await boxes.snapshot(trunk)
    branch = await boxes.fork(first, "branch")
    second = await boxes.snapshot(branch)
    assert len(images_of(OWNER)) == 2
    await boxes.forget(first)
    await boxes.forget(first)
    with pytest.raises(SandboxLost):
        await boxes.fork(first, "too late")
    assert len(images_of(OWNER)) == 2  # a box, and an image, are made of it
    await branch.close()
    twig = await boxes.fork(second, "twig")
    await boxes.forget(second)
    await twig.close()
    await until(lambda: not images_of(OWNER))


@pytest.mark.deep
async def test_close_removes_images_and_containers() -> None:
    async with opened(f"{OWNER}-closing", **COPIED) as sandbox:
        trunk = await sandbox.start("trunk", needs=ROOT)
        await sandbox.fork(await sandbox.snapshot(trunk), "branch")
    assert (containers_of(f"{OWNER}-closing"), images_of(f"{OWNER}-closing")) == ([], [])


@pytest.mark.deep
async def test_what_is_written_counts_for_copies_and_forks() -> None:
    async with opened(snapshot_mb=6, **COPIED) as sandbox:
        trunk = await sandbox.start("trunk", needs=BoxNeeds(own_root=True, storage_mb=8))
        await shell(trunk, "head -c 5m /dev/zero > /etc/five")
        snapshot = await sandbox.snapshot(trunk)
        with pytest.raises(SandboxBusy, match=r"sandbox\.snapshot_mb"):
            await sandbox.snapshot(trunk)
        assert len(images_of(OWNER)) == 1
        branch = await sandbox.fork(snapshot, "branch")
        result = await branch.run(["sh", "-c", "head -c 5m /dev/zero > /etc/more; sleep 60"], timeout_s=60.0)
        assert (result.limit, result.files_lost) == ("storage", True)  # 10 of 8 MB
        assert await shell(branch, "stat -c %s /etc/five; ls /etc/more 2>&1 | wc -l") == f"{5 << 20}\n1\n"


@pytest.mark.deep
async def test_snapshot_that_is_cancelled_leaves_no_image(boxes: DockerSandbox) -> None:
    trunk = await boxes.start("trunk", needs=ROOT)
    for pause_s in (0.0, 0.02, 0.2):
        copying = asyncio.create_task(boxes.snapshot(trunk))
        await asyncio.sleep(pause_s)
        copying.cancel()
        await asyncio.wait([copying])
        if not copying.cancelled():  # it was quicker
            await boxes.forget(copying.result())
    assert await shell(trunk, "echo here") == "here\n"
    await boxes.close()
    assert not images_of(OWNER)


@pytest.mark.deep
async def test_snapshot_of_a_box_without_python(boxes: DockerSandbox) -> None:
    trunk = await boxes.start("trunk", needs=ROOT)
    await shell(trunk, "rm /usr/bin/python3* && echo here > /etc/f")
    branch = await boxes.fork(await boxes.snapshot(trunk), "branch")
    assert await shell(branch, "cat /etc/f") == "here\n"
    with pytest.raises(SandboxError, match="no python3"):
        await branch.run_python("1")
    twig = await boxes.fork(await boxes.snapshot(branch), "twig")
    assert await shell(twig, "cat /etc/f") == "here\n"


@pytest.mark.deep
async def test_chain_of_copies_ends_by_name(boxes: DockerSandbox) -> None:
    """The engine's layers are limited, to some 120."""
    make_layered_image()
    sessions = [await boxes.start("trunk", image=LAYERED_IMAGE, needs=ROOT)]

    async def deepen() -> None:
        while len(sessions) < 200 - MANY_LAYERS:
            await shell(sessions[-1], "date +%N > /etc/changed")  # a copy of nothing new has no layer
            snapshot = await boxes.snapshot(sessions[-1])
            sessions.append(await boxes.fork(snapshot, f"branch {len(sessions)}"))
            await boxes.forget(snapshot)
            await sessions[-2].close()

    with pytest.raises(NoSnapshots, match="copy of a copy"):
        await deepen()
    assert len(sessions) > 5
    assert await shell(sessions[-1], "echo here") == "here\n"


async def test_lost_box_and_image_have_a_type(boxes: DockerSandbox) -> None:
    trunk = await boxes.start("trunk", needs=ROOT)
    snapshot = await boxes.snapshot(trunk)
    docker("rmi", "-f", *images_of(OWNER))
    with pytest.raises(SandboxLost, match="image of snapshot"):
        await boxes.fork(snapshot, "branch")
    docker("rm", "-f", *containers_of(OWNER))
    with pytest.raises(SandboxLost):
        await boxes.snapshot(trunk)
    with pytest.raises(SandboxLost):
        await boxes.fork(Snapshot("unknown"), "branch")


@pytest.mark.deep
@pytest.mark.crash
async def test_kill_9_of_a_worker_leaves_its_images_to_the_next() -> None:
    owner = f"{OWNER}-killed"
    worker = await doomed_worker(owner, DOCKER.model_copy(update={"own_root": True}))
    await DockerSandbox(DOCKER, owner).close()
    assert len(images_of(owner)) == 1  # its process lives
    worker.kill()
    await worker.wait()
    await until(lambda: not containers_of(owner))
    await DockerSandbox(DOCKER, owner).close()
    assert not images_of(owner)


@pytest.mark.crash
async def test_clean_removes_images_of_dead_processes(tmp_path: Path) -> None:
    dead = await asyncio.create_subprocess_exec("true")
    await dead.wait()
    orphan_image({**labels_of(f"{OWNER}-dead", "left", "s"), "penstock.process": f"{dead.pid}-12345"})
    orphan_image(labels_of(OWNER, "kept", "s"))  # this process lives
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("sandbox: {backend: docker}\n", encoding="utf-8")
    done = await asyncio.to_thread(CliRunner().invoke, app, ["clean", "--recipe", str(recipe)])
    assert "1 snapshots" in done.output
    assert [len(images_of(owner)) for owner in (f"{OWNER}-dead", OWNER)] == [0, 1]
    docker("rmi", *images_of(OWNER))


def orphan_image(labels: dict[str, str]) -> None:
    made = docker("create", IMAGE, "true")
    labels = {**labels, "penstock.snapshot": "0123"}
    docker("commit", *(f"--change=LABEL {name}={value}" for name, value in labels.items()), made)
    docker("rm", made)


def test_images_of_other_machines_are_judged_by_age() -> None:
    labels = {**labels_of("run", "", ""), "penstock.machine": "elsewhere"}
    assert not image_is_abandoned({"Labels": labels, "Created": 1e9 - 3600}, now=1e9)
    assert image_is_abandoned({"Labels": labels, "Created": 1e9 - 90_000}, now=1e9)
    assert not image_is_abandoned({"Labels": labels_of("run", "", ""), "Created": 0}, now=1e9)
