"""One load at a time on a GPU: an engine that measures its memory counts what others take or free meanwhile as its own.

    engine     each GPU's lock ── load, measure, capture ── release, and keep the lock of its up-file until it ends
    trainer    wait for the up-files of engines on its GPUs ─► each GPU's lock ── load ── release

A GPU's lock is a file in a folder of this user on this machine. The kernel releases a lock when its holder dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import re
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from penstock.common.files import LOCK_POLL_S, FileLock, private_folder

logger = logging.getLogger(__name__)
DEVICE_WAIT_S = 1800.0
"""Ten starts of ordinary length, for those who start on one GPU."""


class DeviceBusy(Exception):
    """Others loaded onto a GPU for too long; the message names the GPU."""


@contextlib.asynccontextmanager
async def load_on_devices(name: str, devices: Sequence[str], wait_s: float = DEVICE_WAIT_S) -> AsyncIterator[None]:
    """Entered when no other process of this user loads onto `devices`. Raises `DeviceBusy` after `wait_s` seconds.

    Args:
        name: of the caller; those that wait for it log it.
        devices: as CUDA names them, all indices or all UUIDs.
    """
    if not devices:
        yield
        return
    folder = private_folder(Path(tempfile.gettempdir()) / f"penstock-gpus-{os.geteuid()}")
    deadline = time.monotonic() + wait_s
    with contextlib.ExitStack() as locks:
        for device in sorted(set(devices)):  # one order: no two processes wait for each other
            path = folder / f"{device.replace('/', '-')}.lock"

            def on_wait(device: str = device, path: Path = path) -> None:
                logger.info("%s waits: %s loads a model onto GPU %s", name, path.read_text(), device)

            cause = f"others have loaded models onto GPU {device} for {wait_s:g} s; end the process in this file"
            lock = FileLock(path, cause, error=DeviceBusy)
            await lock.acquire_within(deadline - time.monotonic(), on_wait)
            locks.callback(lock.release)
            path.write_text(f"{name}, process {os.getpid()}")
        yield


def named_gpus(words: str) -> tuple[str, ...]:
    """Return the GPUs of a value of CUDA_VISIBLE_DEVICES. As CUDA does, read up to the first word that names none:
    ``-1``, ``NoDevFiles`` (Slurm's), ``void``, also ``all``."""
    gpu = re.compile(r"\d+|(GPU|MIG)-.+")
    return tuple(itertools.takewhile(gpu.fullmatch, (word.strip() for word in words.split(","))))


def visible_devices() -> tuple[str, ...]:
    """Names of the GPUs that CUDA shows this process; all of the machine's where CUDA_VISIBLE_DEVICES is not set."""
    words = os.environ.get("CUDA_VISIBLE_DEVICES")
    if words is not None:
        return named_gpus(words)
    return tuple(path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*"))


async def until_up(files: Sequence[Path], wait_s: float = 900.0) -> None:
    """Returns when the up-file of each engine is locked; with a warning after `wait_s` seconds."""
    deadline, waited = time.monotonic() + wait_s, False
    while absent := [str(file) for file in files if not _is_up(file)]:
        if time.monotonic() >= deadline:
            logger.warning("engines on this trainer's GPUs are not up after %g s: %s", wait_s, ", ".join(absent))
            return
        if not waited:
            logger.info("the trainer's model is loaded after the engines on its GPUs: %s", ", ".join(absent))
        waited = True
        await asyncio.sleep(LOCK_POLL_S)


def _is_up(file: Path) -> bool:
    if not file.exists():
        return False
    lock = FileLock(file, "")
    if lock.try_acquire():
        lock.release()
        return False
    return True
