"""A server's side: a version verified once per machine, then mapped by all processes that load it.

    reader a   takes the version's lock ── reads the file, checks every byte ── records which file that was ──► maps it
    reader b   waits for the lock ── the record names the file that it has opened ────────────────────────────► maps it
    reader c   the holder was killed: the kernel releases its lock ── reads, checks, records ─────────────────► maps it

A delta has no whole file. The lock's holder copies the version that it holds, or the full file, into memory (memfd),
applies the deltas, checks every tensor, and records where others open that memory: ``/proc/PID/fd/N``. It goes with its
last reader; a place that leads nowhere, or to something else, is passed over, and the next reader does the work.

A record proves that a file of one identity (device, inode, size, time of its last write) holds one version. A file that
is exchanged or written to has another identity and is verified again. Records and locks are in a folder of this user
and machine. If there is none, or a holder takes too long, a reader verifies for itself and logs why.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash

from penstock.common import FileLock, append_jsonl, private_folder, read_jsonl
from penstock.weight_sync.files.delta import read_delta
from penstock.weight_sync.files.file_format import verify_tensors
from penstock.weight_sync.files.file_reader import FileReader, open_published, verified_pieces
from penstock.weight_sync.files.mapped_version import MappedTensors, MappedVersion, identity_of
from penstock.weight_sync.manifest import ChainFile, Manifest, WeightsRefused, WeightsUnreachable

logger = logging.getLogger(__name__)
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of this user's alone is made there
WAIT_S = 30.0
WAIT_BYTES_PER_S = 50e6
"""The lock's holder is waited for `WAIT_S` and what the version takes at this rate."""
SHARE_S = 10.0
"""For a worker that has received a version to share it, which it does as soon as it is asked to load it."""
POLL_S = 0.02
TIMESTAMP_S = 0.02
"""More than the steps in which a kernel counts the times of files: a write that comes later has another time."""


class WeightReader:
    """Reads versions; holds the one read last if deltas follow, which it shares with other readers. For one thread."""

    def __init__(self) -> None:
        self._base: MappedVersion | None = None
        self.verified = 0
        """Versions that this process read and checked; the others were verified by another one."""
        self.bytes_read = 0
        """Bytes read from those files."""

    def read(self, manifest: Manifest) -> MappedVersion:
        """Returns the verified version. Raises `WeightsRefused` naming the tensor or the file that is wrong."""
        # Also if another process has verified it: this reader's own path leads to a file of the announced length.
        own = open_published(manifest.files[-1])
        try:
            version = self._read(manifest, own)
        finally:
            os.close(own)
        self._base = version if manifest.deltas_follow else None
        return version

    def share(self, manifest: Manifest, version: MappedVersion) -> None:
        """Lets `shared` of other processes map `version`, which this one received, for as long as it is held here."""
        with _locked_record(manifest) as record:
            if record is not None:
                _add(record, version.descriptor, place=True)

    def shared(self, manifest: Manifest) -> MappedVersion:
        """Maps what another process received. Raises `WeightsUnreachable` if none shares it within `SHARE_S`."""
        deadline = time.monotonic() + SHARE_S
        while time.monotonic() < deadline:
            with _locked_record(manifest) as record:
                descriptor = _open_recorded(record)
            if descriptor is not None:
                return MappedVersion(manifest, descriptor)
            time.sleep(POLL_S)  # a thread or a worker process, never an event loop
        raise WeightsUnreachable(f"version {manifest.version}: no worker shares what it received")

    def forget(self) -> None:
        """Drops the version that is held; the next one is read from its full file on."""
        self._base = None

    def _read(self, manifest: Manifest, own: int) -> MappedVersion:
        if self._base is not None and self._base.state == manifest.state and self._base.is_unchanged:
            return MappedVersion(manifest, os.dup(self._base.descriptor))
        with _locked_record(manifest) as record:
            if manifest.base_version is None:
                identity = identity_of(own)
                if all(entry["identity"] != identity for entry in _entries(record)):
                    self._verify(manifest, own)
                    _add(record, own)
                return MappedVersion(manifest, os.dup(own))
            descriptor = _open_recorded(record)
            if descriptor is None:
                descriptor = self._merge(manifest, own)
                _add(record, descriptor, place=True)
            return MappedVersion(manifest, descriptor)

    def _verify(self, manifest: Manifest, own: int) -> None:
        """Compares every byte of a full version's file with the manifest."""
        file = manifest.files[-1]
        self.verified += 1
        self.bytes_read += file.bytes
        identity = identity_of(own)
        time.sleep(min(max(identity[-1] / 1e9 + TIMESTAMP_S - time.time(), 0.0), TIMESTAMP_S))
        for _ in verified_pieces(manifest, own):
            pass
        if identity_of(own) != identity:
            raise WeightsRefused(f"version {manifest.version}: {file.place} was changed while it was verified")

    def _merge(self, manifest: Manifest, own: int) -> int:
        """The descriptor of memory that holds the version, from the version held here if that is in the chain."""
        files, base = manifest.files, self._base
        behind = next((n for n, file in enumerate(reversed(files)) if base and file.state == base.state), len(files))
        self.verified += 1
        if base is not None and behind < len(files):
            try:
                return self._applied(manifest, base.descriptor, base.state, files[-behind:], own)
            except WeightsRefused as error:
                # A file in between is gone or damaged: what is held is of no use, the full version may be.
                logger.warning("version %d is read from its full version on: %s", manifest.version, error)
        self._base = None
        full = open_published(files[0])
        try:
            self.bytes_read += files[0].bytes
            with FileReader(files[0], full) as opened:
                for _, pieces in opened.streamed():
                    for _ in pieces:
                        pass
                opened.verify_whole()
            return self._applied(manifest, full, files[0].state, files[1:], own)
        finally:
            os.close(full)

    def _applied(self, manifest: Manifest, base: int, state: str, deltas: Sequence[ChainFile], own: int) -> int:
        """A copy of `base`, changed by `deltas` and compared with the manifest."""
        memory = os.memfd_create(f"weights-{manifest.version}", os.MFD_CLOEXEC)
        try:
            size = os.fstat(base).st_size
            while copied := os.sendfile(memory, base, os.lseek(memory, 0, os.SEEK_CUR), size):
                size -= copied
            tensors = MappedTensors(memory, writable=True)
            for file in deltas:
                delta = read_delta(file, own if file is manifest.files[-1] else None)
                self.bytes_read += file.bytes
                if delta.base_state != state:
                    raise WeightsRefused(
                        f"{file.place} changes other weights than those of version {file.base_version}"
                    )
                delta.apply(tensors)
                state = file.state
            verify_tensors(manifest, tensors)
        except BaseException as error:
            os.close(memory)
            if isinstance(error, OSError | ValueError):  # no memory, or the copy is not a safetensors file
                raise WeightsRefused(f"version {manifest.version}: {manifest.files[0].place}: {error}") from error
            raise
        return memory


def read_verified(manifest: Manifest) -> dict[str, torch.Tensor]:
    """The tensors of a version. Raises `WeightsRefused` as `WeightReader.read` does."""
    return dict(WeightReader().read(manifest))


# records -----------------------------------------------------------------------------------------------------------
def record_folder() -> Path:
    """Return the folder of this user's records on this machine; in memory if the system has such a folder."""
    parent = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    return parent / f"penstock-verified-{os.geteuid()}"


@contextlib.contextmanager
def _locked_record(manifest: Manifest) -> Iterator[Path | None]:
    """The version's record, under its lock. None, with the cause logged, if it cannot be had."""
    file = manifest.files[-1]
    total_bytes = sum(part.bytes for part in manifest.files)
    deadline = time.monotonic() + WAIT_S + total_bytes / WAIT_BYTES_PER_S
    # Hashed: a manifest says what a file's checksum is, and must not choose a path by it.
    name = xxhash.xxh3_64_hexdigest(f"{manifest.state} {file.xxh3}".encode())
    try:
        lock = FileLock(private_folder(record_folder()) / name, "another process verifies this version", mode=0o600)
        while not lock.try_acquire():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{lock.path} is held by a process that has not verified the version")
            time.sleep(POLL_S)  # a thread or a worker process, never an event loop
    except OSError as error:
        logger.warning("version %d is verified by this process too: %s", manifest.version, error)
        yield None
        return
    try:
        yield lock.path
    finally:
        lock.release()


def _add(record: Path | None, descriptor: int, *, place: bool = False) -> None:
    """Records a verified file, with a `place` if others are to open it through this process.

    If that cannot be written, a full file system for instance, the cause is logged and others verify for themselves.
    """
    if record is None:
        return
    entry = {"identity": identity_of(descriptor), "place": f"/proc/{os.getpid()}/fd/{descriptor}" if place else ""}
    try:
        append_jsonl(record, [entry])
        for other in record.parent.iterdir():
            with contextlib.suppress(FileNotFoundError):
                # Older records are removed. If one is still in use, its version is verified once more.
                if time.time() - other.stat().st_mtime > 3600.0:
                    other.unlink()
    except OSError as error:
        logger.warning("other processes verify this version too, it cannot be recorded: %s", error)


def _entries(record: Path | None) -> list[dict[str, Any]]:
    return read_jsonl(record, broken="skip") if record is not None else []


def _open_recorded(record: Path | None) -> int | None:
    """A descriptor of memory that another process, or another reader of this one, recorded and still holds."""
    for entry in _entries(record):
        if not entry["place"]:
            continue
        try:
            descriptor = os.open(entry["place"], os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # its process has dropped it, or is gone
            continue
        if identity_of(descriptor) == entry["identity"]:
            return descriptor
        os.close(descriptor)
    return None
