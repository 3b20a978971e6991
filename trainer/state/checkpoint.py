"""Checkpoints: written in the background, whole or not at all, checked before they are used.

    save(step) ──► copy the state (torch thread) ──► step_00000010.tmp/  DCP shards of all ranks
               ──► every rank: checksums of what it writes, taken while it writes
               ──► rank 0: these into ``complete``, fsync, rename to step_00000010/, delete the oldest

A folder without ``complete``, or with a file that differs from it, is not a checkpoint. The folder is readable by its
owner only: DCP's metadata is a pickle. Before a checkpoint is loaded its files are read and compared, by all ranks
together if there are several (`restore`).

A checkpoint also holds the groups of the latest steps. A queue that loses its last seconds with its machine may forget
steps that a checkpoint holds, committed ones too; the checkpoint gives it the groups of those steps again, and none is
trained twice.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from penstock.common import fsync_path, write_atomically
from penstock.common.files import fsync_tree
from penstock.transfer_queue import DataCursor

COMPLETE = "complete"
WRITTEN = "written_{rank}.json"
"""A rank's fingerprints, until the checkpoint is sealed."""
SLOWEST_BYTES_PER_S = 20e6
"""Lowest speed of one rank's disk; a slower one stops the run."""
Fingerprint = Mapping[str, Any]
"""{"bytes", "xxh3"} of a file."""
logger = logging.getLogger(__name__)


def save_timeout_s(publish_timeout_s: float, state_bytes: int) -> float:
    """A checkpoint of which a rank writes `state_bytes` that is not durable and committed by then stops the run."""
    # 900 s to write, seal and commit, without the time for the bytes and for the version that it waits for.
    return publish_timeout_s + 900.0 + state_bytes / SLOWEST_BYTES_PER_S


def read_timeout_s(share_bytes: int) -> float:
    """A rank that has not read and compared its `share_bytes` of a checkpoint by then stops the run."""
    # 600 s to read files of a checkpoint and compare them, without the time for their bytes.
    return 600.0 + share_bytes / SLOWEST_BYTES_PER_S


class NotResumable(RuntimeError):
    """Queue and checkpoints do not fit together; a restart would not help."""


class CheckpointFailed(RuntimeError):
    """A checkpoint or model was not written; the message names its folder and the cause."""


class NotSaved(CheckpointFailed):
    """A restart would not help: the disk is full, or the trainer received a stop."""


def failed_save(
    folder: Path, nbytes: int | None, error: BaseException, *, removes: bool, what: str = "checkpoint"
) -> CheckpointFailed:
    """Return the failure of the unfinished `folder` of `nbytes`, if these are known. `removes`: this rank removes it,
    so that it does not fill the disk.

    torch's `CheckpointException`, which is not an `Exception`, has an error for each rank that failed; safetensors'
    has the number in its text.
    """
    if removes:
        shutil.rmtree(folder, ignore_errors=True)
    errors = [one for one, _ in getattr(error, "failures", {}).values()] or [error]
    cause = next((one for one in errors if isinstance(one, OSError)), errors[0])
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        if getattr(cause, "errno", None) == number or f"(os error {number})" in str(cause):
            free = f"{shutil.disk_usage(folder.parent).free / 1e9:.3g} GB"
            takes = f"more than the {free} that" if nbytes is None else f"{nbytes / 1e9:.3g} GB, and {free}"
            return NotSaved(
                f"{what} {folder} was not written: {os.strerror(number)}. It takes {takes} are free without it. "
                "Free the rest and start again (a run with --resume): what was saved before is there"
            )
    return CheckpointFailed(f"{what} {folder} was not written: {type(cause).__name__}: {cause}")


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A whole checkpoint."""

    path: Path
    step: int
    """Optimizer steps in it: training continues with this one."""
    data_cursor: DataCursor
    """Place in the data stream after the last submitted task."""
    ranks: int
    """Number of ranks that wrote it; another number can read it."""
    batches: Mapping[int, Groups] = field(default_factory=dict)
    """Groups of the latest steps in it, from before the last commit on: for a queue that has forgotten them."""


@dataclass(frozen=True, slots=True)
class MarkedCheckpoint:
    """A checkpoint whose marker is whole; its files were not read."""

    info: CheckpointInfo
    files: Mapping[str, Fingerprint]
    """Fingerprint of each file when it was sealed, by its path in the checkpoint's folder."""


class CheckpointStore:
    """The folder ``checkpoints/`` of a run. Only rank 0 seals, finds and deletes; the shards come from all ranks."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self._keep = keep
        self.damaged = 0
        """Checkpoints that were set aside, in all lives of the run."""

    def open(self) -> None:
        """Make the folder, private to its owner; what a killed trainer left half-written goes."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for leftover in self.folder.glob("*.tmp"):
            logger.warning("checkpoint %s was never finished: its writer died; it is removed", leftover)
            shutil.rmtree(leftover)
        self.damaged = len(list(self.folder.glob("*.damaged")))

    def unfinished(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}.tmp"

    def seal(self, step: int, data_cursor: DataCursor, ranks: int, batches: Mapping[int, Groups]) -> CheckpointInfo:
        """Make the unfinished folder a checkpoint. When this returns it survives a power cut.

        Raises `OSError` where a file is not as long as the rank that wrote it says.
        """
        temporary, final = self.unfinished(step), self.unfinished(step).with_suffix("")
        files = _taken_fingerprints(temporary)
        marker = {
            "step": step,
            "data_cursor": asdict(data_cursor),
            "ranks": ranks,
            "batches": {str(step): [list(group) for group in groups] for step, groups in batches.items()},
            "files": files,
        }
        (temporary / COMPLETE).write_text(json.dumps({**marker, "xxh3": _digest(marker)}, indent=1))
        fsync_tree(temporary)
        if final.exists():  # of an earlier life of the run that went back behind this step
            shutil.rmtree(final)
        temporary.rename(final)
        fsync_path(self.folder)
        for path in self._newest_first()[self._keep :]:
            shutil.rmtree(path)
        return CheckpointInfo(final, step, data_cursor, ranks, batches)

    @property
    def oldest_step(self) -> int:
        """Step of the oldest checkpoint. Raises `ValueError` if there is none."""
        return int(self._newest_first()[-1].name.removeprefix("step_"))

    def newest_marked(self) -> MarkedCheckpoint | None:
        """The newest checkpoint whose marker is whole; those whose marker is not are set aside."""
        for path in self._newest_first():
            try:
                return read_marker(path)
            except (OSError, ValueError, KeyError, TypeError) as error:
                self.set_aside(path, str(error))
        return None

    def set_aside(self, path: Path, problem: str) -> None:
        """Give a damaged checkpoint another name."""
        logger.error("checkpoint %s is damaged (%s); taking the one before", path, problem)
        aside = path.with_suffix(".damaged")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        self.damaged = len(list(self.folder.glob("*.damaged")))

    def _newest_first(self) -> list[Path]:
        return sorted((p for p in self.folder.glob("step_*") if not p.suffix), reverse=True)


def read_whole(path: Path) -> CheckpointInfo:
    """Check every file of a checkpoint. Raises `OSError` or `ValueError` naming what is missing or different."""
    marked = read_marker(path)
    problem = damage_in(path, marked.files)
    if problem:
        raise ValueError(problem)
    return marked.info


def read_marker(path: Path) -> MarkedCheckpoint:
    """Read the marker, the only file of the checkpoint that is checked here. Raises `OSError`, `ValueError`,
    `KeyError`, `TypeError`.
    """
    marker = json.loads((path / COMPLETE).read_text())
    if _digest({key: value for key, value in marker.items() if key != "xxh3"}) != marker["xxh3"]:
        raise ValueError(f"{COMPLETE} differs from its checksum")
    batches = {int(step): groups for step, groups in marker["batches"].items()}
    cursor = DataCursor(**marker["data_cursor"])
    return MarkedCheckpoint(
        CheckpointInfo(path, int(marker["step"]), cursor, int(marker["ranks"]), batches), marker["files"]
    )


def damage_in(folder: Path, expected: Mapping[str, Fingerprint], timeout_s: float | None = None) -> str:
    """Reads these files of `folder`; says which is missing or different, or nothing. Raises `TimeoutError`."""
    pool = ThreadPoolExecutor(4, "checksum")  # hashing and reading leave the interpreter to others
    try:
        fingerprints = pool.map(lambda name: fingerprint(folder / name), expected, timeout=timeout_s)
        for name, one in zip(expected, fingerprints, strict=True):
            if one != expected[name]:
                return f"{name} differs from its checksum"
        return ""
    except TimeoutError:
        raise
    except OSError as error:
        return str(error)
    finally:
        # Not waited for: a read that the disk does not answer is never over.
        pool.shutdown(wait=False, cancel_futures=True)


def _digest(marker: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(marker, sort_keys=True).encode())


def fingerprint(path: Path) -> dict[str, Any]:
    """{"bytes", "xxh3"} of a file."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return {"bytes": path.stat().st_size, "xxh3": digest.hexdigest()}


def leave_fingerprints(folder: Path, rank: int, written: Mapping[str, Mapping[str, Any]]) -> None:
    """Leave the fingerprints of the files that `rank` wrote into the unfinished checkpoint `folder`, by their path in
    it; for `seal`.
    """
    write_atomically(folder / WRITTEN.format(rank=rank), json.dumps(written))


def _taken_fingerprints(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the fingerprints of all files below `folder`: those that ranks left, which are removed; other files are
    read.
    """
    fingerprints: dict[str, dict[str, Any]] = {}
    for path in folder.glob(WRITTEN.format(rank="*")):
        fingerprints |= json.loads(path.read_text())
        path.unlink()
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    if lost := fingerprints.keys() - set(names):
        raise FileNotFoundError(f"{folder} lacks {min(lost)}, which a rank has written")
    for name in fingerprints:
        if (size := (folder / name).stat().st_size) != fingerprints[name]["bytes"]:
            raise OSError(f"{folder / name} has {size} bytes, its writer wrote {fingerprints[name]['bytes']}")
    return {name: fingerprints.get(name) or fingerprint(folder / name) for name in names}


Groups = Sequence[Sequence[str]]
"""Episode ids by group."""


class RecentBatches:
    """Step → groups, for every step that is not committed or was so within `keep_s`: far more than a Redis with
    ``appendfsync: everysec`` may lose."""

    def __init__(self, keep_s: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._keep_s = keep_s
        self._clock = clock
        self._groups: dict[int, Groups] = {}
        self._commits: list[tuple[float, int]] = []
        """(when, steps below which were committed), oldest first."""

    def add(self, step: int, groups: Groups) -> None:
        self._groups[step] = groups

    def update(self, batches: Mapping[int, Groups]) -> None:
        """Take over the batches of the checkpoint that was restored."""
        self._groups |= batches

    def committed(self, step: int) -> None:
        """Steps below `step` are committed."""
        self._commits.append((self._clock(), step))

    def below(self, step: int) -> dict[int, Groups]:
        """Return the batches that a checkpoint of `step` has to remember."""
        durable_since = self._clock() - self._keep_s
        first = max((below for when, below in self._commits if when <= durable_since), default=0)
        self._commits = [(when, below) for when, below in self._commits if when > durable_since]
        self._groups = {number: groups for number, groups in self._groups.items() if number >= first}
        return {number: groups for number, groups in self._groups.items() if number < step}
