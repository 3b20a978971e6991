"""Mends the end of Redis's append-only file after a crash of its machine, before Redis reads it.

A script's writes stand between MULTI and EXEC in the file. Where a crash cuts such a block in the middle of a command,
redis-server cuts off that command only: the block stays open, and what is appended later falls into it, so that the
restart after the next one executes half a script and refuses others. ``redis-check-aof --fix`` cuts the whole block
off. Every redis-server binary is that tool too, under that name.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from penstock.transfer_queue.queue import QueueError

TIMEOUT_S = 600.0


def mend_append_only_file(binary: str, directory: Path) -> None:
    """Cut off what a crash left unfinished at the end; nothing where the file is whole or not there.

    Blocking: it reads the whole file once. Raises `QueueError` where the file is damaged before its end.
    """
    for name in ("appendonlydir/appendonly.aof.manifest", "appendonly.aof"):  # Redis 7, and before
        path = directory / name
        if path.exists():
            _check_and_fix(binary, path)
            return


def _check_and_fix(binary: str, path: Path) -> None:
    done = subprocess.run(
        ["redis-check-aof", "--fix", path.name],
        executable=binary,
        cwd=path.parent,
        input="y\n",
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        last = (done.stdout + done.stderr).strip().splitlines()[-3:]
        raise QueueError(
            f"{path} is damaged and cannot be mended: {' | '.join(last)}. Bring it back from a copy, or start "
            "anew with another directory; the trainer goes on from its newest checkpoint"
        )


def newest_append_only_file(directory: Path) -> Path:
    """The file that Redis appends to now."""
    increments = directory.glob("appendonlydir/*.incr.aof")
    return max(increments, key=lambda path: path.stat().st_mtime_ns, default=directory / "appendonly.aof")
