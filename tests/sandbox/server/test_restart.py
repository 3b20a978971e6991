"""`penstock sandbox` killed with SIGKILL: nothing of its boxes runs on, and the next one clears away the rest."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from tests.ports import free_port
from tests.sandbox.conftest import box_cgroups, box_processes
from tests.sandbox.containers import IMAGE, containers_of
from tests.sandbox.server.conftest import TOKEN, answers, headers, remote_of
from tests.until import until

from penstock.deploy import ConfigError, load_sandbox
from penstock.sandbox import SandboxConfig, SandboxError, SandboxLost

pytestmark = [pytest.mark.bwrap, pytest.mark.crash]


@contextlib.asynccontextmanager
async def command(port: int, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`penstock sandbox`, ended with the block however it is left."""
    argv = [sys.executable, "-m", "penstock.deploy.cli", "sandbox", "--port", str(port), *arguments]
    process = await asyncio.create_subprocess_exec(*argv, env={**os.environ, "PENSTOCK_TOKEN": TOKEN})
    try:
        await answers(f"http://127.0.0.1:{port}", deadline_s=200)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await asyncio.wait_for(process.wait(), 120)


async def test_server_what_a_killed_server_leaves_the_next_one_ends() -> None:
    port = free_port()
    url, owner = f"http://127.0.0.1:{port}", f"sandbox-{port}"
    sandbox = remote_of(url)
    async with command(port, "sandbox.max_boxes=4", "sandbox.server.warm={default: 2}") as first:
        session = await sandbox.start("run/episode 1")
        await session.run_shell("(setsid sleep 1000 &); sleep 1000 &")
        running = asyncio.create_task(session.run_python("import time; time.sleep(1000)", timeout_s=1000.0))
        await until(lambda: len(box_processes(first.pid)) >= 4 and len(box_cgroups(owner)) >= 3)
        first.send_signal(signal.SIGKILL)
        await first.wait()
    with pytest.raises(SandboxError):
        await running
    await until(lambda: not box_processes(first.pid))  # they end with the server, without anybody's help

    async with command(port) as second:
        assert all(f"/{second.pid}-" in str(path) for path in box_cgroups(owner))  # of the first none is left
        with pytest.raises(SandboxLost):
            await sandbox.attach(session.session_id)
        again = await sandbox.start("run/episode 1")
        assert (await again.run_python("1 + 1")).stdout == "2\n"
    await until(lambda: not box_processes(second.pid))
    assert box_cgroups(owner) == []
    await sandbox.close()


@pytest.mark.docker
async def test_server_containers_of_a_killed_server_end_with_it(tmp_path: Path) -> None:
    """No session is reattached: the connection to its driver was the server's."""
    port = free_port()
    url, owner = f"http://127.0.0.1:{port}", f"sandbox-{port}"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"sandbox: {{backend: docker, image: '{IMAGE}', max_boxes: 3, server: {{warm: {{default: 1}}}}}}")
    sandbox = remote_of(url)
    async with command(port, "--recipe", str(recipe)) as first:
        session = await sandbox.start("run/episode 1", image=IMAGE)
        assert (await session.run_python("x = 5; x")).stdout == "5\n"
        assert (await session.run_shell("cd /usr; Y=6; pwd")).stdout == "/usr\n"
        pieces = [piece.data async for piece in session.stream(["echo", "streamed"])]
        assert pieces == ["streamed\n", ""]
        with pytest.raises(SandboxError, match=r"nowhere:1.*docker pull"):
            await sandbox.start("x", image="nowhere:1")
        assert len(containers_of(owner)) >= 2
        first.send_signal(signal.SIGKILL)
        await first.wait()
    async with command(port, "--recipe", str(recipe), "sandbox.server.warm={}"):
        await until(lambda: not containers_of(owner))
        with pytest.raises(SandboxLost):
            await sandbox.attach(session.session_id)
    await sandbox.close()


async def test_server_server_that_cannot_start_says_why_in_one_line() -> None:
    argv = [sys.executable, "-m", "penstock.deploy.cli", "sandbox", "--port", str(free_port())]
    env = {**os.environ, "PENSTOCK_TOKEN": TOKEN}
    process = await asyncio.create_subprocess_exec(*argv, "sandbox.backend=remote", env=env, stderr=subprocess.PIPE)
    _, stderr = await asyncio.wait_for(process.communicate(), 200)
    assert process.returncode == 2
    assert stderr.decode().splitlines()[-1].startswith("a sandbox server holds boxes itself")
    assert "Traceback" not in stderr.decode()


def test_server_its_settings_are_the_sandbox_section_alone(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: x\ntrainer: {nonsense: 1}\nsandbox: {max_boxes: 3, pids: 9}")
    config = load_sandbox(recipe, ["sandbox.max_boxes=5"])
    assert (config.max_boxes, config.pids) == (5, 9)
    assert load_sandbox(None).max_boxes == SandboxConfig().max_boxes
    with pytest.raises(ConfigError, match=r"sandbox\.max_boxs: no such key; did you mean 'sandbox\.max_boxes'"):
        load_sandbox(None, ["sandbox.max_boxs=3"])
    with pytest.raises(ConfigError, match=r"sandbox\.server\.warm\.default: .*greater than 0"):
        load_sandbox(None, ["sandbox.server.warm={default: 0}"])
    with pytest.raises(ConfigError, match=r"reads only sandbox\.\*, not trainer"):
        load_sandbox(None, ["trainer.lr=1"])


async def test_server_command_serves_with_the_limits_it_was_told() -> None:
    port = free_port()
    async with command(port, "sandbox.max_boxes=3", "sandbox.output_bytes=100"):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers(), timeout=60) as client:
            health = (await client.get("/health")).json()
            assert (health["max_boxes"], health["sessions"], health["warm"]) == (3, 0, 0)
            assert health["containment"].startswith("bwrap: no network")
        sandbox = remote_of(f"http://127.0.0.1:{port}")
        session = await sandbox.start("x")
        assert len((await session.run_python("print('x' * 1000)")).stdout) == 100
        await sandbox.close()
