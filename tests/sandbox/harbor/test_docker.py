"""Tasks in containers of their own images: ten of our own making, the older format, what goes wrong with images."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.sandbox.containers import docker
from tests.sandbox.harbor.conftest import (
    BOXES,
    LANGUAGES,
    TASKS,
    TERMINAL_BENCH,
    WriteTask,
    build,
    require_languages,
)

from penstock.datasets.harbor import Checker
from penstock.sandbox import Sandbox, make_sandbox
from penstock.sandbox.harbor import HarborEnvironment, HarborTaskError, read_task
from penstock.sandbox.protocol import NoSuchImage, UnmetNeeds

pytestmark = [pytest.mark.harbor, pytest.mark.docker, pytest.mark.deep]
CONTAINERS = BOXES.model_copy(update={"backend": "docker", "image": LANGUAGES, "memory_mb": 1024})


@pytest_asyncio.fixture
async def containers() -> AsyncIterator[Sandbox]:
    await require_languages()
    made = make_sandbox(CONTAINERS, f"tests-{os.getpid()}")
    yield made
    await made.close()


async def test_ten_tasks_are_solved_by_their_solutions_alone(containers: Sandbox, tmp_path: Path) -> None:
    """C, C++, JavaScript, Perl without a Python in the image, Python, SQL, two services, a long build."""
    checker = Checker(containers, tmp_path / "record.jsonl", build, {}, concurrency=2)
    found = await checker.check([*sorted(TASKS.iterdir()), TERMINAL_BENCH / "old-format"])
    assert len(found) == 11
    assert [(one.task, one.problem) for one in found if not one.sound] == []


async def test_a_shell_in_a_container_is_its_root_and_no_more(containers: Sandbox) -> None:
    task = read_task(TASKS / "python-fix")
    await build(task)
    environment = await HarborEnvironment.open(containers, task)

    async def says(command: str) -> str:
        result = await environment.run(command, 60.0)
        return (result.stdout + result.stderr).strip()

    assert await says("id -u; pwd; echo $HOME") == "0\n/app\n/root"
    assert await says("echo 1 > /usr/bin/tool && chown 1000 /usr/bin/tool && stat -c %u /usr/bin/tool") == "1000"
    assert "rror" in await says("python3 -c 'import socket; socket.create_connection((\"172.17.0.1\", 80), 2)'")
    for forbidden in (
        "mount -t tmpfs x /mnt",
        "cat /proc/1/environ",
        "cat /proc/1/mem",
        "readlink /proc/1/fd/0",
        "timeout 5 cat /proc/1/fd/0",
        "echo forged > /proc/1/fd/1",
        "mknod /d b 8 0",
        "chroot / true",
    ):
        assert (await environment.run(forbidden, 60.0)).exit_code != 0, forbidden
    assert await says("kill -9 1; echo lives") == "lives"
    assert int(await says("grep CapEff /proc/self/status | cut -f2"), 16) < 1 << 9, "no capability over the machine"
    await environment.close()


async def test_files_beyond_the_tasks_storage_end_its_box_alone(containers: Sandbox, write_task: WriteTask) -> None:
    toml = '[environment]\nworkdir = "/app"\nstorage_mb = 16\n'
    flooded = await HarborEnvironment.open(containers, read_task(write_task("floods", toml=toml)))
    other = await HarborEnvironment.open(containers, read_task(write_task("other", toml=toml)))
    result = await flooded.run("head -c 60000000 /dev/zero > /app/large; sleep 300", 200.0)
    assert (result.exit_code, result.limit) == (None, "storage")
    assert result.files_lost
    assert (await flooded.session.run(["ls", "/app/large"], timeout_s=60.0)).exit_code != 0
    assert (await flooded.grade()).reward == 0.0
    assert (await other.run("head -c 8000000 /dev/zero > /app/small && sleep 5", 60.0)).exit_code == 0
    for environment in (flooded, other):
        await environment.close()


async def test_forks_are_bounded_and_the_box_is_graded(containers: Sandbox, write_task: WriteTask) -> None:
    environment = await HarborEnvironment.open(
        containers, read_task(write_task(toml='[environment]\nworkdir = "/app"\n'))
    )
    await environment.run("f() { f | f & }; f; sleep 2", 20.0)
    assert (await environment.grade()).reward == 0.0
    await environment.close()


READY = '[environment]\ndocker_image = "penstock-no/such:1"\n'
ENTRY = f'FROM {LANGUAGES}\nENTRYPOINT ["sh", "-c", "echo no entry >&2; exit 3"]\n'
IMAGES = {  # task.toml, Dockerfile, the error of a start, its words
    "an image that nobody has": (READY, "", NoSuchImage, "No such image"),
    "a base that nobody has": ("", "FROM penstock-no/base:1\n", NoSuchImage, "cannot be built"),
    "a command that fails": ("", f"FROM {LANGUAGES}\nRUN echo broken && false\n", NoSuchImage, "broken"),
    "a build that never ends": (
        *("[environment]\nbuild_timeout_sec = 5\n", f"FROM {LANGUAGES}\nRUN sleep 1000\n"),
        *(NoSuchImage, "within 5 s"),
    ),
    "another user": ("", f"FROM {LANGUAGES}\nUSER nobody\n", UnmetNeeds, "runs as user nobody"),
    "an entry point that fails": ("", ENTRY, HarborTaskError, "entry point failed: no entry"),
}


async def test_images_that_cannot_be_had_are_named_and_block_no_other(
    containers: Sandbox, write_task: WriteTask, tmp_path: Path
) -> None:
    folders = [
        write_task(f"task-{number}", toml=toml, files={"environment/Dockerfile": text})
        for number, (toml, text, _, _) in enumerate(IMAGES.values())
    ]
    good = write_task("good", toml='[environment]\nworkdir = "/app"\n')
    checker = Checker(containers, tmp_path / "record.jsonl", build, {}, concurrency=3)
    *found, last = await checker.check([*folders, good])
    assert last.sound
    for folder, (case, (_, _, kind, named)), one in zip(folders, IMAGES.items(), found, strict=True):
        assert not one.sound, case
        assert named in one.problem, (case, one.problem)
        with pytest.raises(kind):
            await started(containers, folder)


async def started(sandbox: Sandbox, folder: Path) -> HarborEnvironment:
    task = read_task(folder)
    await build(task)
    return await HarborEnvironment.open(sandbox, task)


def test_builds_leave_no_container() -> None:
    """After those that failed and the one that was ended."""
    left = docker("ps", "-a", "--filter", "ancestor=" + LANGUAGES, "--format", "{{.Command}}")
    assert "sleep 1000" not in left
