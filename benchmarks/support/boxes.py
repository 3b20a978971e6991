"""Sides of the sandbox benchmark: sessions of a backend, the bare command line, a `penstock sandbox` process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import IO

from benchmarks.support.child import ROOT
from penstock.sandbox import Sandbox, SandboxConfig, SandboxError, Session, make_sandbox

START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class SandboxServer:
    pid: int
    port: int
    url: str
    token: str


@contextlib.asynccontextmanager
async def sandbox_server(
    config: SandboxConfig, token: str, log: IO[bytes] | None = None
) -> AsyncIterator[SandboxServer]:
    """Boxes of bubblewrap with the other settings of `config`; `log`: where it writes (None: this process's stderr).

    Raises:
        SandboxError: it ended instead of listening.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    settings = config.model_dump(exclude_defaults=True, exclude={"backend", "url"}, mode="json")
    command = [sys.executable, "-m", "penstock.deploy.cli", "sandbox", "--port", str(port)]
    process = await asyncio.create_subprocess_exec(
        *command,
        *(f"sandbox.{key}={value}" for key, value in settings.items()),
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "PENSTOCK_TOKEN": token},
        stdin=subprocess.DEVNULL,
        stdout=log or subprocess.DEVNULL,
        stderr=log,
    )
    try:
        await _listening(port, process)
        yield SandboxServer(process.pid, port, f"http://127.0.0.1:{port}", token)
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), STOP_DEADLINE_S)


async def _listening(port: int, process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(START_DEADLINE_S):
        while not _accepts(port):
            if process.returncode is not None:
                raise SandboxError(f"the sandbox server ended with {process.returncode}")
            await asyncio.sleep(0.05)


def _accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


NOTHING = ["true"]
"""A command that does nothing: what is left is the cost of getting it run."""
BWRAP = "bwrap --unshare-all --die-with-parent --ro-bind /usr /usr --proc /proc --dev /dev --tmpfs /tmp --chdir /tmp"
DOCKER = "--network none --read-only --cap-drop ALL --security-opt no-new-privileges --user 65534:65534 --tmpfs /tmp"
COMMAND_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class BoxSide:
    backend: str
    sandbox: Sandbox
    session: Session
    """Open from the first sample to the last."""
    bare_exec: list[str]
    """Runs a command in a box that is there, as far as the tool has such a thing (bwrap makes one each time)."""
    bare_run: list[str]
    """A fresh box for one command, gone afterwards."""


def run_bare(command: Sequence[str]) -> None:
    """Raises `CalledProcessError`: a side that fails quickly would look quick."""
    subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_TIMEOUT_S, check=True
    )  # as a session's, its output is read and kept


async def run_in(session: Session, command: list[str]) -> None:
    """Raises `SandboxError` where the command did not end as it should."""
    result = await session.run(command, timeout_s=COMMAND_TIMEOUT_S)
    if result.exit_code != 0:
        raise SandboxError(f"{command} ended with {result}")


@contextlib.asynccontextmanager
async def open_side(backend: str, config: SandboxConfig) -> AsyncIterator[BoxSide]:
    """Raises `SandboxError` where this backend cannot work here, with the fix."""
    async with contextlib.AsyncExitStack() as stack:
        settings = {"backend": backend}
        if backend == "remote":
            server = await stack.enter_async_context(sandbox_server(config, secrets.token_urlsafe(16)))
            settings["url"] = server.url
        token = server.token if backend == "remote" else None
        sandbox = make_sandbox(config.model_copy(update=settings), f"bench-{os.getpid()}", token)
        stack.push_async_callback(sandbox.close)
        session = await sandbox.start("bench")
        stack.push_async_callback(session.close)
        yield BoxSide(backend, sandbox, session, *_by_hand(stack, backend, config))


def bare_bwrap() -> list[str]:
    """The command line that makes a box for the command after it."""
    command = BWRAP.split()
    for path in ("/bin", "/lib", "/lib64"):
        command += ["--symlink", f"usr{path}", path] if os.path.islink(path) else ["--ro-bind", path, path]
    return [*command, "--"]


def _by_hand(
    stack: contextlib.ExitStack | contextlib.AsyncExitStack, backend: str, config: SandboxConfig
) -> Sequence[list[str]]:
    """(bare_exec, bare_run)"""
    if backend != "docker":
        return bare_bwrap(), bare_bwrap()
    name = f"penstock-bench-{secrets.token_hex(4)}"
    stack.callback(subprocess.run, ["docker", "rm", "-f", name], capture_output=True, timeout=COMMAND_TIMEOUT_S)
    run_bare(["docker", "run", "--detach", "--name", name, *DOCKER.split(), config.image, "sleep", "infinity"])
    return ["docker", "exec", name], ["docker", "run", "--rm", *DOCKER.split(), config.image]
