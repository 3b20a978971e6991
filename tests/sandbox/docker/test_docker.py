"""Containers: what the engine is asked for, what ends them, and what is said where one cannot be had."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.sandbox.conftest import DOCKER, OWNER, doomed_worker, opened
from tests.sandbox.containers import IMAGE, PLAIN_IMAGE, all_boxes, containers_of, docker, inspect, make_plain_image
from tests.sandbox.server.conftest import TOKEN, serving
from tests.until import until

from penstock.sandbox import RemoteSandbox, RunResult, SandboxConfig, SandboxError, SandboxLost, Session, make_sandbox
from penstock.sandbox.config import SandboxServerConfig
from penstock.sandbox.docker.orphans import is_abandoned, labels_of
from penstock.sandbox.docker.sandbox import DockerSandbox
from penstock.sandbox.docker.spec import uid_of

pytestmark = pytest.mark.docker


@pytest_asyncio.fixture
async def boxes() -> AsyncIterator[DockerSandbox]:
    async with opened() as sandbox:
        yield sandbox


@pytest_asyncio.fixture
async def box(boxes: DockerSandbox) -> Session:
    return await boxes.start("a test")


async def test_docker_engine_has_every_wall_on_record(box: Session) -> None:
    found = inspect(containers_of(OWNER)[0])
    host, config = found["HostConfig"], found["Config"]
    wanted = {
        **{"NetworkMode": "none", "ReadonlyRootfs": True, "Privileged": False, "CapDrop": ["ALL"], "CapAdd": None},
        **{"Memory": 256 << 20, "MemorySwap": 256 << 20, "PidsLimit": 64, "NanoCpus": 10**9, "ShmSize": 16 << 20},
        **{
            "AutoRemove": True,
            "Binds": None,
            "IpcMode": "private",
            "PidMode": "",
            "Devices": None,
            "VolumesFrom": None,
        },
    }
    assert {key: host[key] for key in wanted} == wanted
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    assert host["LogConfig"]["Type"] == "none"
    assert not found["LogPath"]
    assert [mount["Type"] for mount in found["Mounts"]] == []
    assert config["User"] == f"{uid_of(0, False)}:{uid_of(0, False)}"
    labels = config["Labels"]
    assert (labels["penstock.owner"], labels["penstock.label"]) == (OWNER, "a test")
    assert labels["penstock.session"] == box.session_id


async def test_docker_two_filters_and_no_rights_hold_each_process(box: Session) -> None:
    status = (await box.run(["cat", "/proc/self/status"])).stdout
    facts = dict(line.split(":\t", 1) for line in status.splitlines())
    assert {facts[f"Cap{kind}"] for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
    assert (facts["NoNewPrivs"], facts["Seccomp"], facts["Seccomp_filters"]) == ("1", "2", "2")


async def test_docker_memory_held_by_files_ends_the_box() -> None:
    """Files in memory outlive the processes that wrote them: the kernel ends the driver too in the end."""
    async with opened(memory_mb=64, tmp_mb=512) as sandbox:
        session = await sandbox.start("full")
        ended = [result async for result in _filled(session)]
        assert ended[0].limit == "memory"
        assert (ended[-1].exit_code, ended[-1].limit, ended[-1].files_lost) == (None, "memory", True)
        assert (await session.run_python("1 + 1")).stdout == "2\n"


async def _filled(session: Session) -> AsyncIterator[RunResult]:
    """Results of calls that fill /tmp, up to the one that loses the files.

    A killed writer leaves as much room as it had memory of its own. Where that is enough for an interpreter, code runs.
    """
    for _ in range(20):
        result = await session.run(["sh", "-c", "head -c 400m /dev/zero >> /tmp/full"])
        yield result
        if not result.files_lost:
            result = await session.run_python("1 + 1")
            yield result
        if result.files_lost:
            return


async def test_docker_closing_leaves_no_container(boxes: DockerSandbox) -> None:
    sessions = await asyncio.gather(*(boxes.start(str(n)) for n in range(3)))
    await asyncio.gather(*(s.run(["sh", "-c", "setsid sleep 100 & sleep 0.01"]) for s in sessions))
    assert len(containers_of(OWNER)) == 3
    await sessions[0].close()
    assert len(containers_of(OWNER)) == 2
    await boxes.close()
    assert not containers_of(OWNER)


@pytest.mark.deep
async def test_docker_start_that_is_cancelled_leaves_no_container(boxes: DockerSandbox) -> None:
    for pause_s in (0.0, 0.03, 0.1):
        starting = asyncio.create_task(boxes.start("never mind"))
        await asyncio.sleep(pause_s)
        if starting.cancel():
            with pytest.raises(asyncio.CancelledError):
                await starting
        else:  # it was faster than the pause
            await (await starting).close()
        assert not containers_of(OWNER)
    session = await boxes.start("after")
    assert (await session.run_python("3")).stdout == "3\n"


@pytest.mark.deep
async def test_docker_start_cancelled_twice_leaves_no_container(boxes: DockerSandbox) -> None:
    starting = asyncio.create_task(boxes.start("never mind"))
    await asyncio.sleep(0.03)
    for _ in range(2):
        starting.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await starting
    session = await boxes.start("after")  # by now the other one is made, if it still was to be
    assert (await session.run_python("3")).stdout == "3\n"
    await until(lambda: len(containers_of(OWNER)) == 1)


async def test_docker_box_removed_from_outside_is_lost(box: Session) -> None:
    call = asyncio.create_task(box.run_python("while True: pass", timeout_s=30.0))
    await asyncio.sleep(0.2)
    docker("rm", "-f", *containers_of(OWNER))
    with pytest.raises(SandboxLost):
        await call
    with pytest.raises(SandboxLost):
        await box.run_python("1")


@pytest.mark.crash
async def test_docker_kill_9_of_the_worker_ends_and_removes_its_boxes() -> None:
    owner = f"{OWNER}-killed"
    worker = await doomed_worker(owner, DOCKER)
    assert len(containers_of(owner)) == 1
    worker.kill()
    await worker.wait()
    await until(lambda: not containers_of(owner))


@pytest.mark.crash
async def test_docker_next_start_removes_half_made_containers() -> None:
    owner = f"{OWNER}-half"
    dead = await asyncio.create_subprocess_exec("true")
    await dead.wait()
    for process in (f"{dead.pid}-12345", labels_of(owner, "", "")["penstock.process"]):
        labels = {**labels_of(owner, "left", "s"), "penstock.process": process}
        docker("create", *(f"--label={key}={value}" for key, value in labels.items()), IMAGE, "true")
    assert len(containers_of(owner)) == 2
    await DockerSandbox(DOCKER, owner).close()
    (kept,) = containers_of(owner)
    docker("rm", kept)


def test_docker_judges_containers_of_other_machines_by_age() -> None:
    labels = {**labels_of("run", "", ""), "penstock.machine": "elsewhere"}
    assert not is_abandoned({"Labels": labels, "State": "running", "Created": 0}, now=1e9)
    assert not is_abandoned({"Labels": labels, "State": "created", "Created": 1e9 - 60}, now=1e9)
    assert is_abandoned({"Labels": labels, "State": "created", "Created": 1e9 - 700}, now=1e9)


async def test_docker_image_that_engine_does_not_have_names_mend(boxes: DockerSandbox) -> None:
    with pytest.raises(SandboxError, match=r"No such image.*docker pull.*sandbox\.image"):
        make_sandbox(DOCKER.model_copy(update={"image": "no-such/image:1"}), OWNER)
    with pytest.raises(SandboxError, match="No such image"):
        await boxes.start("a session's own", image="no-such/image:1")
    assert (await (await boxes.start("another")).run_python("1")).stdout == "1\n"


def test_docker_runtime_that_engine_does_not_have_names_mend() -> None:
    with pytest.raises(SandboxError, match=r"no runtime kata.*runc.*daemon\.json"):
        make_sandbox(DOCKER.model_copy(update={"runtime": "kata"}), OWNER)


def test_docker_no_engine_names_the_mend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
    with pytest.raises(SandboxError, match=r"no Docker engine answers.*apt-get install docker\.io.*DOCKER_HOST"):
        make_sandbox(DOCKER, OWNER)


def test_docker_socket_that_this_user_may_not_open_names_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object, **__: object) -> object:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(asyncio.unix_events._UnixSelectorEventLoop, "create_unix_connection", refuse)
    monkeypatch.setenv("DOCKER_HOST", "unix:///var/run/docker.sock")
    with pytest.raises(SandboxError, match="usermod -aG docker"):
        make_sandbox(DOCKER, OWNER)


def test_docker_engine_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("penstock.sandbox.docker.engine.CALL_DEADLINE_S", 0.2)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "silent.sock"))
        silent.listen()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/silent.sock")
        with pytest.raises(SandboxError, match="did not answer"):
            make_sandbox(SandboxConfig(backend="docker"), OWNER)


async def test_docker_server_keeps_containers_warm_by_image() -> None:
    make_plain_image()
    config = DOCKER.model_copy(update={"server": SandboxServerConfig(warm={"default": 1})})
    async with serving(config) as url:
        first = RemoteSandbox(config, url, TOKEN)
        session = await first.start("an episode")
        await session.run_python("x = 41")
        await session.leave()
        await first.close()
        again = RemoteSandbox(config, url, TOKEN)
        attached = await again.attach(session.session_id)
        assert (await attached.run_python("x + 1")).stdout == "42\n"
        plain = await again.start("another image", image=PLAIN_IMAGE)
        assert (await plain.run(["echo", "hello"])).stdout == "hello\n"
        with pytest.raises(SandboxError, match=r"no python3 of 3\.9"):
            await plain.run_python("1")
        with pytest.raises(SandboxError, match="docker pull"):
            await again.start("no image", image="no-such/image:1")
        await again.close()
    await until(lambda: not [line for line in all_boxes() if "exited" in line])  # the engine removes them when it can


async def test_docker_python_runs_under_gvisor() -> None:
    runtimes = docker("info", "--format", "{{range $name, $_ := .Runtimes}}{{$name}} {{end}}").split()
    if "runsc" not in runtimes:
        pytest.skip("the engine has no runtime runsc: apt-get install runsc, then scripts/setup-docker")
    async with opened(runtime="runsc", pids=512) as sandbox:
        assert "runsc" in sandbox.containment
        session = await sandbox.start("a kernel of its own")
        await session.run_python("x = 40", timeout_s=60.0)
        assert (await session.run_python("x + 2", timeout_s=60.0)).stdout == "42\n"
        assert (await session.run(["uname", "-r"], timeout_s=60.0)).stdout.strip() != os.uname().release
