"""One verified copy of a version per machine: one process reads and checks the files, all readers map the result.

    reader a   takes the version's lease ── reads the files, checks every byte ──► sealed memory ── hands it out
    reader b   asks the holder of the lease ── waits ──────────────────────────────────────────────► maps it
    reader c   the holder was killed ── takes the lease itself ── reads, checks, hands out

What was checked is the memory that is used: an anonymous file (memfd), sealed once it is verified, so that no process
can change or cut it. The lease is a bound socket name of Linux's abstract namespace, which has no file and which the
kernel frees when its holder dies. A result is never recorded apart from the memory that it is of: a process that is
killed while it reads leaves nothing that could be taken for a verified version.

A lease whose holder is another user, stops, or hands out something else is left alone: the reader checks the files by
itself. Processes without a common network namespace do not see each other's leases; each then has a copy of its own.

| thread | consumes | waits for | ends |
| --- | --- | --- | --- |
| the caller of `NodeReader.read` | files, or a descriptor | the holder, by bytes at most | with the version |
| hand-out, of the holder | connections of readers | them, or `LINGER_S` after `done` | with the lease |
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence

from penstock.weight_sync.files.file_reader import open_published
from penstock.weight_sync.files.version_memory import MemoryDraft, MemoryLayout, VersionMemory
from penstock.weight_sync.manifest import ChainFile, Manifest, WeightsRefused, WeightsUnreachable

logger = logging.getLogger(__name__)
WAIT_S = 30.0
WAIT_BYTES_PER_S = 50e6
"""A holder is waited for `WAIT_S` and what the version takes at this rate."""
SHARE_S = 10.0
"""For a worker that has received a version to hand it out, which it does as soon as it is asked to load it."""
RETRY_S = 0.02
LINGER_S = 5.0
"""A lease outlives its holder's need by this: other servers of the machine update at about the same time."""
SEND_S = 5.0
ACCEPT_S = 0.5
BACKLOG = 128
_READY = b"v"
_CREDENTIALS = struct.Struct("3i")
"""Of SO_PEERCRED: process, user, group."""


class LeaseUnusable(Exception):
    """Another process has the lease, and nothing that can be used comes of it; the message has the cause."""


class VersionLease:
    """The right to verify one version on this machine. `take`, then `hand_out` or `close`."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._ends_at: float | None = None
        self._thread: threading.Thread | None = None

    @classmethod
    def take(cls, name: str) -> VersionLease | None:
        """None while another process has it. Raises `LeaseUnusable` where this system has no such sockets."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(name)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE:
                return None
            raise LeaseUnusable(f"it cannot be had: {error}") from error
        return cls(listener)

    def hand_out(self, descriptor: int) -> None:
        """From a thread, to every process of this user that asks, until `let_go` or `close`."""
        kept = os.dup(descriptor)
        self._thread = threading.Thread(target=self._serve, args=(kept,), name="verified weights", daemon=True)
        self._thread.start()

    def let_go(self) -> None:
        """The holder needs the version no more: the lease ends `LINGER_S` later."""
        if self._ends_at is None:
            self._ends_at = time.monotonic() + LINGER_S

    def close(self) -> None:
        """Ends the lease now; who waits takes it. May be repeated."""
        self._ends_at = 0.0
        with contextlib.suppress(OSError):  # closed by its thread
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if self._thread is None:
            self._listener.close()
        else:
            self._thread.join(SEND_S + 2 * ACCEPT_S)

    def _serve(self, descriptor: int) -> None:
        self._listener.settimeout(ACCEPT_S)
        try:
            with self._listener:
                while self._ends_at is None or time.monotonic() < self._ends_at:
                    try:
                        connection, _ = self._listener.accept()
                    except TimeoutError:
                        continue
                    except OSError:  # shut down
                        return
                    with connection:
                        _send(connection, descriptor)
        finally:
            os.close(descriptor)


def _send(connection: socket.socket, descriptor: int) -> None:
    connection.settimeout(SEND_S)
    try:
        if _of_this_user(connection):
            socket.send_fds(connection, [_READY], [descriptor])
    except OSError as error:  # it verifies by itself then
        logger.info("a reader of verified weights is gone: %r", error)


def ask_holder(name: str, wait_s: float) -> int | None:
    """The verified memory's descriptor, from the lease's holder, which may still be reading.

    None where the lease has no holder any more: it is free. Raises `LeaseUnusable`.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(max(wait_s, RETRY_S))
        try:
            connection.connect(name)
            if not _of_this_user(connection):
                raise LeaseUnusable("another user has the lease")
            said, descriptors, _, _ = socket.recv_fds(connection, len(_READY), 1, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError as error:
            raise LeaseUnusable(f"its holder has not verified it in {wait_s:.0f} s") from error
        except (ConnectionError, BlockingIOError):  # gone; or too many ask at once
            return None
        except OSError as error:
            raise LeaseUnusable(f"its holder cannot be asked: {error}") from error
    if said == _READY and descriptors:
        return descriptors[0]
    return None


def _of_this_user(connection: socket.socket) -> bool:
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(found)[1] == os.geteuid())


class NodeReader:
    """A process's reader of versions. One thread at a time calls it.

    Holds the memory of the version read last where the trainer says that deltas follow; it is shared, not copied.
    """

    def __init__(self) -> None:
        self._held: VersionMemory | None = None
        self._lease: VersionLease | None = None
        self.verified = 0
        """Versions whose files this process read and checked; the others came verified from another process."""

    def read(self, manifest: Manifest) -> VersionMemory:
        """The version, verified on this machine. Raises `WeightsRefused` naming the tensor or the file."""
        self._end_lease()
        # Also where another process verifies: the reader's own path leads to a file of the announced kind and length.
        own = open_published(manifest.files[-1])
        try:
            memory = self._obtain(manifest, own)
        finally:
            os.close(own)
        self._held = memory if manifest.deltas_follow else None
        return memory

    def share(self, memory: VersionMemory, name: str) -> None:
        """Hand out what this process received, to `shared` of the same `name`, until `done`."""
        self._end_lease()
        try:
            lease = VersionLease.take(lease_name(name))
        except LeaseUnusable as error:
            lease = None
            logger.warning("version %d cannot be handed to this machine's other workers: %s", memory.version, error)
        if lease is not None:
            lease.hand_out(memory.descriptor)
            self._lease = lease

    def shared(self, manifest: Manifest, name: str, layout: MemoryLayout) -> VersionMemory:
        """What another process of this machine received. Raises `WeightsUnreachable` where none hands it out."""
        give_up_at = time.monotonic() + SHARE_S
        while (left_s := give_up_at - time.monotonic()) > 0:
            try:
                descriptor = ask_holder(lease_name(name), left_s)
                if descriptor is not None:
                    return _adopted(manifest, descriptor, layout)
            except LeaseUnusable as error:
                raise WeightsUnreachable(f"version {manifest.version}: what was received: {error}") from error
            time.sleep(RETRY_S)  # a thread or a worker process, never an event loop
        raise WeightsUnreachable(f"version {manifest.version}: no worker hands out what it received")

    def done(self) -> None:
        """The version read last is loaded and compared; memory that no delta needs is freed by its last reader."""
        if self._lease is not None:
            self._lease.let_go()

    def close(self) -> None:
        """Ends the lease and forgets what is held."""
        self._end_lease()
        self._held = None

    def _obtain(self, manifest: Manifest, own: int) -> VersionMemory:
        if self._held is not None and self._held.state == manifest.state:
            return self._held.renamed(manifest)
        name = lease_name(manifest.state)
        give_up_at = time.monotonic() + WAIT_S + total_bytes(manifest) / WAIT_BYTES_PER_S
        while True:
            try:
                if (lease := VersionLease.take(name)) is not None:
                    break
                descriptor = ask_holder(name, give_up_at - time.monotonic())
                if descriptor is not None:
                    return _adopted(manifest, descriptor, MemoryLayout.of(manifest))
            except LeaseUnusable as error:
                logger.warning("version %d is verified by this process too: the lease: %s", manifest.version, error)
                return self._verify(manifest, own)
            time.sleep(RETRY_S)  # a thread or a worker process, never an event loop
            if time.monotonic() > give_up_at:
                logger.warning("version %d is verified by this process too: its holders come and go", manifest.version)
                return self._verify(manifest, own)
        return self._verify_for_all(manifest, own, lease)

    def _verify_for_all(self, manifest: Manifest, own: int, lease: VersionLease) -> VersionMemory:
        try:
            memory = self._verify(manifest, own)
        except BaseException:
            lease.close()
            raise
        lease.hand_out(memory.descriptor)
        self._lease = lease
        return memory

    def _verify(self, manifest: Manifest, own: int) -> VersionMemory:
        files, base = manifest.files, self._held
        behind = _links_behind(files, base.state) if base is not None else len(files)
        try:
            if base is not None and behind < len(files) and base.has_form_of(manifest):
                return self._verified(manifest, files[-behind:], own, base)
        except WeightsRefused as error:
            # A file in between is gone or damaged: what is held is of no use, the full version may be.
            logger.warning("version %d is read from its full version on: %s", manifest.version, error)
        self._held = None
        return self._verified(manifest, files, own, None)

    def _verified(
        self, manifest: Manifest, files: Sequence[ChainFile], own: int, base: VersionMemory | None
    ) -> VersionMemory:
        self.verified += 1
        try:
            with MemoryDraft(manifest) as draft:
                if base is not None:
                    draft.copy(base)
                for file in files:
                    draft.apply(file, own if file is manifest.files[-1] else None)
                return draft.sealed()
        except OSError as error:
            size = f"{total_bytes(manifest) >> 20} MiB"
            raise WeightsRefused(
                f"version {manifest.version}: no copy of {size} can be kept in memory: {error}"
            ) from error

    def _end_lease(self) -> None:
        if self._lease is not None:
            self._lease.close()


def lease_name(what: str) -> str:
    """Of the version of that state, or of what a server received, for this user's processes."""
    return f"\0penstock-weights-{os.geteuid()}-{what}"


def total_bytes(manifest: Manifest) -> int:
    """Of its files: about what has to be read."""
    return sum(file.bytes for file in manifest.files)


def _links_behind(files: Sequence[ChainFile], state: str) -> int:
    """How many files lead from `state` to the version; all of them where none of it can be used."""
    for behind, file in enumerate(reversed(files)):
        if file.state == state:
            return behind
    return len(files)


def _adopted(manifest: Manifest, descriptor: int, layout: MemoryLayout) -> VersionMemory:
    """Raises `LeaseUnusable` where it is not sealed memory of that layout's size."""
    try:
        return VersionMemory.adopt(manifest, descriptor, layout)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, ValueError):
            raise LeaseUnusable(f"its holder hands out {error}") from error
        raise
