"""Images without python3: commands, files and limits hold; what needs a driver says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.sandbox.conftest import DOCKER, OWNER
from tests.sandbox.containers import PLAIN_IMAGE, containers_of, docker, inspect, make_plain_image

from penstock.sandbox import SandboxError, SandboxLost, Session
from penstock.sandbox.docker.container import Container
from penstock.sandbox.docker.sandbox import DockerSandbox

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module", autouse=True)
def _image() -> None:
    make_plain_image()


@pytest_asyncio.fixture
async def plain() -> AsyncIterator[Session]:
    sandbox = DockerSandbox(DOCKER.model_copy(update={"output_bytes": 4096, "cpu_s": 2}), OWNER)
    yield await sandbox.start("without python", image=PLAIN_IMAGE)
    await sandbox.close()
    assert not containers_of(OWNER)


async def test_exec_session_passes_stdin_and_returns_exit_codes(plain: Session) -> None:
    result = await plain.run(["sh", "-c", "cat; echo oops >&2; exit 4"], stdin="hälló" * 50_000)
    assert (result.exit_code, result.stderr, result.limit) == (4, "oops\n", "output")
    assert result.stdout.startswith("hällóhälló")
    assert len(result.stdout.encode()) <= 4096
    assert (await plain.run(["no-such-program"])).exit_code == 127
    assert (await plain.run(["sh", "-c", "pwd; echo $GREETING $HOME"])).stdout == "/tmp\nhello /tmp\n"
    assert (await plain.run(["pwd"], cwd="/usr")).stdout == "/usr\n"
    assert (await plain.run(["sh", "-c", "kill -15 $$"])).exit_code == -15


async def test_exec_session_what_needs_a_driver_names_the_mend(plain: Session) -> None:
    with pytest.raises(SandboxError, match=r"no python3 of 3\.9.*python:3"):
        await plain.run_python("1")
    with pytest.raises(SandboxError, match=r"use `run`"):
        await plain.run_shell("cd /")


async def test_exec_session_output_comes_as_it_is_written(plain: Session) -> None:
    outputs = [output async for output in plain.stream(["sh", "-c", "echo one; sleep 0.3; echo two >&2"])]
    assert [(o.stream, o.data) for o in outputs[:-1]] == [("stdout", "one\n"), ("stderr", "two\n")]
    result = outputs[-1].result
    assert result is not None
    assert (result.stdout, result.stderr, result.exit_code) == ("one\n", "two\n", 0)


async def test_exec_session_timeout_ends_all_and_keeps_files(plain: Session) -> None:
    await plain.write_file("kept", b"x")
    result = await plain.run(["sh", "-c", "setsid sleep 600 & echo started; sleep 600"], timeout_s=3.0)
    assert (result.stdout, result.exit_code, result.limit, result.state_lost) == ("started\n", None, "wall", False)
    assert "sleep" not in (await plain.run(["ps", "-e"])).stdout
    assert await plain.read_file("kept") == b"x"


async def test_exec_session_cancelled_while_killing_leaves_none(
    plain: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def held(_: Container) -> bool:
        begun.set()
        await asyncio.sleep(60)
        return True

    monkeypatch.setattr("penstock.sandbox.docker.exec_session._all_killed", held)
    call = asyncio.create_task(plain.run(["sh", "-c", "setsid sleep 600 & sleep 600"], timeout_s=0.2))
    await asyncio.wait_for(begun.wait(), 60)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not containers_of(OWNER)


async def test_exec_session_limits_are_told_by_their_names(plain: Session) -> None:
    eat = "head -c 4G /dev/zero | tail -n 1"  # `tail` keeps a line whole, and reads it in a fraction of `cpu_s`
    assert (await plain.run(["sh", "-c", eat], timeout_s=60.0)).limit == "memory"
    result = await plain.run(["sh", "-c", "while :; do :; done"], timeout_s=60.0)
    assert (result.exit_code, result.limit) == (None, "cpu")
    assert (await plain.run(["yes"], timeout_s=60.0)).limit == "output"
    assert (await plain.run(["echo", "still here"])).stdout == "still here\n"


async def test_exec_session_restarts_after_a_fork_bomb(plain: Session) -> None:
    result = await plain.run(["sh", "-c", "f() { f | f & f; }; f"], timeout_s=1.0)
    assert result.exit_code != 0
    assert (await plain.run(["echo", "fresh"], timeout_s=20.0)).stdout == "fresh\n"


async def test_exec_session_files_go_in_and_come_out(plain: Session) -> None:
    data = bytes(range(256)) * 4000
    await plain.write_file("folder.bin", data)
    assert await plain.read_file("folder.bin") == data
    assert await plain.read_file("/tmp/folder.bin", max_bytes=3) == b"\x00\x01\x02"
    await plain.write_file("-n", b"")
    assert await plain.read_file("-n") == b""
    with pytest.raises(FileNotFoundError):
        await plain.read_file("nothing-here")
    with pytest.raises(OSError, match="Read-only"):
        await plain.write_file("/usr/x", b"x")
    await plain.run(["mkfifo", "/tmp/pipe"])
    with pytest.raises(PermissionError, match="regular"):
        await plain.write_file("pipe", b"x")
    with pytest.raises(PermissionError, match="regular"):
        await plain.read_file("/dev/zero")


async def test_exec_session_what_an_image_brings_along_is_held(plain: Session) -> None:
    """A declared volume would be a writable folder on the host's disk; a health check, code that nobody asked for."""
    found = inspect(containers_of(OWNER)[0])
    assert not found["Mounts"]
    filled = await plain.run(["sh", "-c", "head -c 100m /dev/zero > /data/full"], timeout_s=20.0)
    assert "No space left" in filled.stderr
    assert (await plain.run(["sh", "-c", "rm /data/full; id -u"])).stdout != "65534\n"
    await asyncio.sleep(1.5)
    assert (await plain.run(["ls", "/tmp"])).stdout == ""


async def test_exec_session_box_that_was_removed_from_outside_is_lost(plain: Session) -> None:
    stream = plain.stream(["sh", "-c", "echo started; exec sleep 60"], timeout_s=60.0)
    assert (await anext(stream)).data == "started\n"
    call = asyncio.ensure_future(anext(stream))
    docker("rm", "-f", *containers_of(OWNER))
    with pytest.raises(SandboxLost):
        await call


async def test_exec_session_cancelled_call_ends_its_box(plain: Session) -> None:
    call = asyncio.create_task(plain.run(["sleep", "60"], timeout_s=60.0))
    await asyncio.sleep(0.5)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not containers_of(OWNER)
    assert (await plain.run(["echo", "again"])).stdout == "again\n"
