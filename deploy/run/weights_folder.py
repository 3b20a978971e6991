"""The folder of a run's published weights: in shared memory, held while a role lives, or on a shared disk.

    /dev/shm/penstock-NAME-PLACE-SECRET     PLACE: of the run's folder, SECRET: of its token
        flock, shared: the head and each role that uses it. The kernel releases it, however they end.

Shared memory outlives its users. A folder without a holder belongs to a run that was killed: the next role that starts
on this machine removes it, and so does ``penstock clean``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64_hexdigest

from penstock.common import private_folder
from penstock.deploy.config import RunConfig
from penstock.deploy.run_dir import RunDir

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a run has a private folder there, and removes it
_NAME = re.compile(r"penstock-.+-[0-9a-f]{8}-[0-9a-f]{20}")
_ATTEMPTS = 20
logger = logging.getLogger("penstock.run")


def weights_dir(config: RunConfig, token: str) -> Path:
    """Shared memory, also where HTTP serves them; or the run's folder on a shared disk."""
    if config.rollout.weight_transport == "disk":
        return RunDir.of(config).root / "weights"
    return local_weights_dir(config, token)


def local_weights_dir(config: RunConfig, token: str) -> Path:
    """Return the folder in which servers of this machine keep fetched or merged weights; never on a shared disk.

    Only the roles of a run know its token: the name cannot be taken before the run takes it.
    """
    digest = hashlib.sha256(f"weights of {config.name}: {token}".encode()).hexdigest()
    return local_weights_prefix(config).with_name(f"{local_weights_prefix(config).name}{digest[:20]}")


def local_weights_prefix(config: RunConfig) -> Path:
    """Return the prefix of the folders of all lives of this run.

    Runs of one name in two folders have two of them: the first to end would take the other's weights away.
    """
    place = xxh3_64_hexdigest(bytes(RunDir.of(config).root))[:8]
    return SHARED_MEMORY / f"penstock-{config.name}-{place}-"


@contextlib.contextmanager
def weights_entered(config: RunConfig, token: str) -> Iterator[Path]:
    """The run's folder in this machine's shared memory, which this user alone may enter, held until the end.

    What killed runs left next to it is removed first; the folder itself goes at the end if it is empty and has no
    other holder. Raises `NotPrivate` where something else has its name.
    """
    for leftover in remove_abandoned():
        logger.info("removed %s: its run was killed (%d MB)", leftover.path, leftover.bytes / 1e6)
    folder = local_weights_dir(config, token)
    descriptor = hold_folder(folder)
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):  # others hold it, or it has files for a role that starts again
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            folder.rmdir()
        os.close(descriptor)


def hold_folder(folder: Path) -> int:
    """Makes or enters the private folder; a descriptor that holds it until it is closed, or its process ends.

    Raises `NotPrivate`.
    """
    for _ in range(_ATTEMPTS):
        private_folder(folder)
        with contextlib.suppress(FileNotFoundError):  # removed in between: it had no holder
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            fcntl.flock(descriptor, fcntl.LOCK_SH)  # waits for a removal that is on its way
            if _is_still(descriptor, folder):
                return descriptor
            os.close(descriptor)
    raise OSError(f"{folder}: removed {_ATTEMPTS} times while it was entered")


def remove_weights(config: RunConfig) -> None:
    """Remove the folders of all lives of the run on this machine; no role reads them any more."""
    prefix = local_weights_prefix(config)
    on_disk = [RunDir.of(config).root / "weights"] if config.rollout.weight_transport == "disk" else []
    for directory in (*(folder for folder in _own_folders() if folder.name.startswith(prefix.name)), *on_disk):
        shutil.rmtree(directory, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class AbandonedWeights:
    """A folder of a run of which no role lives on this machine."""

    path: Path
    bytes: int


def remove_abandoned() -> list[AbandonedWeights]:
    """Removes this user's folders without a holder; what was removed."""
    removed = []
    for folder in _own_folders():
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # another one removes it
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still(descriptor, folder):
                size = sum(path.lstat().st_size for path in folder.rglob("*"))
                shutil.rmtree(folder)
                removed.append(AbandonedWeights(folder, size))
        except BlockingIOError:
            continue
        except OSError as error:
            logger.warning("%s is left behind: %s", folder, error)
        finally:
            os.close(descriptor)
    return removed


def living_folders() -> list[Path]:
    """This user's folders on this machine; right after `remove_abandoned`, those of living runs."""
    return sorted(_own_folders())


def _own_folders() -> list[Path]:
    """Folders of weights that belong to this user. Links are not followed."""
    folders = []
    for path in SHARED_MEMORY.iterdir() if SHARED_MEMORY.is_dir() else ():
        with contextlib.suppress(OSError):  # removed meanwhile
            state = path.lstat()
            if _NAME.fullmatch(path.name) and stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid():
                folders.append(path)
    return folders


def _is_still(descriptor: int, path: Path) -> bool:
    """Return True if `path` leads to the folder that was opened."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False
