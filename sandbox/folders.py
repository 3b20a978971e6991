"""A whole folder into a box and out of it, as one small tar; on every backend whose boxes have `tar`."""

from __future__ import annotations

import errno
import secrets

from penstock.sandbox.protocol import RunResult, Session
from penstock.sandbox.session import MAX_FILE_BYTES

TIMEOUT_S = 60.0
_UNPACK = 'mkdir -p -- "$2" && tar -x -f "$1" -C "$2"'
_PACK = 'tar -c -f "$1" -C "$2" --exclude="./$1" .'


async def put_folder(session: Session, path: str, tar: bytes) -> None:
    """Unpack `tar` (GNU tar takes it compressed too) into the folder `path`, which is made where it is missing.

    Unpacked inside the box: a name with ``..`` leads only where the box's own code could go. Raises `OSError` where it
    does not unpack or is too large, and `SandboxError`.
    """
    await _with_archive(session, path, _UNPACK, tar)


async def get_folder(session: Session, path: str, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """The folder `path` as a tar without compression, names relative to it.

    What it holds was written by code that nobody trusts: unpack it with ``tarfile``'s ``filter="data"``.
    Raises `OSError` where there is no such folder or its tar is longer than `max_bytes`, and `SandboxError`.
    """
    return await _with_archive(session, path, _PACK, None, max_bytes)


async def _with_archive(
    session: Session, path: str, script: str, content: bytes | None, max_bytes: int = MAX_FILE_BYTES
) -> bytes:
    archive = f".penstock-{secrets.token_hex(8)}.tar"
    try:
        if content is not None:
            await session.write_file(archive, content)
        _check(await session.run(["sh", "-c", script, "sh", archive, path], timeout_s=TIMEOUT_S), path)
        data = await session.read_file(archive, max_bytes) if content is None else b""
        if content is None and len(data) == max_bytes:
            raise OSError(errno.EFBIG, f"more than {max_bytes} bytes as a tar", path)
        return data
    finally:
        await session.run(["rm", "-f", "--", archive], timeout_s=TIMEOUT_S)


def _check(result: RunResult, path: str) -> None:
    if result.exit_code == 0:
        return
    words = result.stderr.strip().splitlines()
    reason = words[-1] if words else f"stopped ({result.limit})" if result.limit else f"exit {result.exit_code}"
    code = (
        errno.ENOENT if "No such file" in result.stderr or "can't change directory" in result.stderr else errno.EINVAL
    )
    raise OSError(code, reason, path)
