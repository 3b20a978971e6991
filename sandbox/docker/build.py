"""Images from Dockerfiles, by the `docker` program: what a person asks for by a command, never what a run does.

A Dockerfile runs its author's code as root in containers of the engine, with the network that it is given.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil

from penstock.sandbox.protocol import NoSuchImage, SandboxError

_KEPT_CHARACTERS = 1500
_CHUNK_BYTES = 1 << 16


async def has_image(name: str) -> bool:
    """Raises `SandboxError` if the `docker` program is missing."""
    status, _ = await _docker(["image", "inspect", name], b"", timeout_s=60.0)
    return status == 0


async def build_image(name: str, context: bytes, timeout_s: float, network: str = "default") -> None:
    """Builds the tar `context`, which has a Dockerfile, as image `name`.

    Raises:
        NoSuchImage: it cannot be built, or not in time; the message has the builder's last words.
        SandboxError: the `docker` program is missing.
    """
    argv = ["build", "--network", network, "--tag", name, "--force-rm", "-"]
    try:
        status, output = await _docker(argv, context, timeout_s)
    except TimeoutError as error:
        raise NoSuchImage(
            f"image {name} was not built within {timeout_s:g} s (environment.build_timeout_sec)"
        ) from error
    if status != 0:
        raise NoSuchImage(f"image {name} cannot be built: {output.strip()}")


async def _docker(arguments: list[str], stdin: bytes, timeout_s: float) -> tuple[int, str]:
    """(status, the end of its output). Raises `TimeoutError`: the program and the build are ended then."""
    program = shutil.which("docker")
    if program is None:
        raise SandboxError("the program `docker` is missing, which builds images: install it (scripts/setup-docker)")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        program, *arguments, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(timeout_s):
            _, output = await asyncio.gather(_feed(process, stdin), _end_of_output(process))
            return await process.wait(), output
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _feed(process: asyncio.subprocess.Process, stdin: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):  # it ended before it had read all: its status says why
        for start in range(0, len(stdin), _CHUNK_BYTES):
            process.stdin.write(stdin[start : start + _CHUNK_BYTES])
            await process.stdin.drain()
    process.stdin.close()


async def _end_of_output(process: asyncio.subprocess.Process) -> str:
    """However much it writes, the end alone is kept."""
    assert process.stdout is not None
    end = b""
    while chunk := await process.stdout.read(_CHUNK_BYTES):
        end = (end + chunk)[-4 * _KEPT_CHARACTERS :]
    return end.decode("utf-8", "replace")[-_KEPT_CHARACTERS:]
