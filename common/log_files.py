"""Logs of processes that run for weeks, rotated while they are written."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from pathlib import Path
from typing import BinaryIO, Literal

logger = logging.getLogger(__name__)
LOGS_S = 30.0
KEPT_LOGS = 2


async def keep_logs_bounded(folder: Path) -> None:
    """Bounds the logs of `folder` until cancelled."""
    while True:
        try:
            await asyncio.to_thread(bound_logs, folder)
        except OSError as error:
            logger.warning("logs in %s not bounded: %s", folder, error)
        await asyncio.sleep(LOGS_S)


def bound_logs(folder: Path, max_bytes: int = (16 << 20)) -> None:
    """Rotates every ``*.log`` of `folder` longer than `max_bytes`, and keeps the `KEPT_LOGS` last ones.

        engine-hf.log ──copied, then truncated──► engine-hf.log.1 ──► .2 ──► deleted

    Truncated in place, not renamed: a running process has the file open, and appends at the end wherever the end is.
    """
    for log in folder.glob("*.log"):
        if log.stat().st_size <= max_bytes:
            continue
        for number in range(KEPT_LOGS, 1, -1):
            older = log.with_name(f"{log.name}.{number - 1}")
            if older.exists():
                older.replace(log.with_name(f"{log.name}.{number}"))
        with log.open("rb") as current, open_log(log.with_name(f"{log.name}.1"), "wb") as copy:
            shutil.copyfileobj(current, copy)
        os.truncate(log, 0)


def open_log(path: Path, mode: Literal["ab", "wb"] = "ab") -> BinaryIO:
    """A log that only this user can read, also where the file was there before: servers write their keys into it."""
    file = open(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600))  # noqa: SIM115
    os.fchmod(file.fileno(), 0o600)
    return file
