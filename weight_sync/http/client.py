"""A server's side of ``http``, and of ``broadcast`` for what it missed: fetches versions' files. All of it blocks.

    manifest with URLs ──► each file of its chain that is missing here ──► manifest with paths, as under ``shm``
                           from peers or the trainer

    trainer ── 206 ──► its bytes                  no other server has the file yet
            ── 303 ──► a peer's bytes             a server that has fetched and verified it
            ── 503 ──► ask again soon             its holders are busy, or the first server is still fetching it
    trainer away ────► peers that it named earlier

A file arrives in a ``.part`` named after its checksum. After a cut, also after this process was killed, the fetch
continues from the bytes that are there, at the next source. A complete file with the right checksum is renamed. One
that an earlier life has renamed is compared again: file names are not trusted. A fetch may last as long as it advances
(`progress`).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from penstock.common import Backoff, NotPrivate, bearer_headers, private_folder
from penstock.weight_sync.files.delta import read_delta
from penstock.weight_sync.files.file_format import DELTA, PIECE_BYTES, PartialFile, checksum
from penstock.weight_sync.files.file_reader import FileReader
from penstock.weight_sync.files.mapped_version import Identity, identity_of
from penstock.weight_sync.http.progress import STALL_S, FetchProgress
from penstock.weight_sync.http.scheduler import AVOID, SERVES
from penstock.weight_sync.manifest import LOCAL_NAME, SERVED, ChainFile, Manifest, WeightsRefused, WeightsUnreachable

SILENCE_S = 15.0
ATTEMPTS = 5
"""Connections in a row that bring nothing before it is given up."""
PAUSE_S = 0.1
"""Between two requests while another server fetches the file."""
RECONNECT = Backoff(PAUSE_S)
"""After connections that brought nothing."""
logger = logging.getLogger(__name__)


def verify_whole(file: ChainFile, part: PartialFile, checksums: Mapping[str, str]) -> None:
    """Raises `WeightsRefused` and deletes the file if it is not what was announced.

    `checksums`: of the version's tensors, for a file that has none.
    """
    if part.length != file.bytes or part.xxh3 != file.xxh3:
        here = replace(file, place=str(part.path), bytes=part.length, xxh3="")
        try:
            raise WeightsRefused(f"version {file.version}: {file.place}: {_find_damage(here, checksums)}")
        finally:
            part.path.unlink(missing_ok=True)


def _find_damage(file: ChainFile, checksums: Mapping[str, str]) -> str:
    """Describe damage of a file with the tensor's name; files know the checksums of their content."""
    try:
        with FileReader(file) as opened:
            if opened.metadata.get("penstock") != DELTA:
                announced = json.loads(opened.metadata["xxh3"]) if "xxh3" in opened.metadata else checksums
                wrong = [name for name, tensor in opened.tensors() if checksum(tensor) != announced[name]]
                return f"tensor {wrong[0]!r} is not what was announced" if wrong else "its header is damaged"
        read_delta(file)
    except WeightsRefused as error:
        return str(error)
    except (KeyError, ValueError, TypeError) as error:
        return f"its header is damaged: {error!r}"
    return "its header is damaged"


class ConnectionCut(Exception):
    """The connection broke or was never made; the message has the cause. Received bytes stay valid."""


class FetchBusy(Exception):
    """The trainer asks for patience: another server is fetching the file."""


@dataclass
class _FetchJob:
    """One file that is being fetched."""

    file: ChainFile
    local_name: str
    part: PartialFile
    progress: FetchProgress
    avoid: set[str]
    """Peers that failed us with this file."""
    sources: set[str] = field(default_factory=set)
    """Peers that bytes came from."""


class FileFetch:
    """Knows the peers that the trainer named. One thread at a time calls `run`."""

    def __init__(self, token: str, serves: str, closed: threading.Event) -> None:
        self._token, self._serves, self._closed = token, serves, closed
        self._peers: list[str] = []
        """Newest first."""
        self.bytes_received = {"trainer": 0, "peers": 0}

    def run(self, file: ChainFile, local_name: str, part: PartialFile, stall_s: float, avoid: set[str]) -> set[str]:
        """Until `part` is as long as it must be; the peers that it came from. `local_name` is the file's name there.

        Connections that bring something may follow each other freely. Raises `WeightsUnreachable`, `WeightsRefused`.
        """
        job = _FetchJob(file, local_name, part, FetchProgress(file.bytes, part.length, stall_s), set(avoid))
        fruitless = 0
        while (have := part.length) < file.bytes:
            try:
                self._ask_trainer(job)
            except FetchBusy as error:
                job.progress.waited()
                self._pause(job, PAUSE_S, error)
            except (ConnectionCut, OSError, http.client.HTTPException) as error:
                for peer in self._peers:
                    if part.length < file.bytes and peer not in job.avoid and not self._closed.is_set():
                        self._ask_peer(job, peer)
                fruitless = fruitless + 1 if part.length == have else 0
                self._may_go_on(job, fruitless, error)
        return job.sources

    def tell(self, file: ChainFile) -> None:
        """The trainer may send others here for this file. Not heard, it costs a download there."""
        if not (serves := self._offer(file)):
            return
        try:
            with self._connected(file.place) as connection:
                headers = {**bearer_headers(self._token), SERVES: serves}
                connection.request("PUT", urlsplit(file.place).path, headers=headers)
                connection.getresponse().read()
        except (OSError, http.client.HTTPException) as error:
            logger.info("the trainer does not know that version %d is here: %r", file.version, error)

    def _offer(self, file: ChainFile) -> str:
        """Return the address that is announced to the trainer. A loopback address is of use only to a trainer, and its
        servers, on this machine.
        """
        return self._serves if _on_loopback(self._serves) <= _on_loopback(file.place) else ""

    def _ask_trainer(self, job: _FetchJob) -> None:
        """Append what comes, from the trainer or from the peer that it names."""
        serves = self._offer(job.file)
        headers = {SERVES: serves, AVOID: ",".join(sorted(job.avoid))} if serves else {}
        with self._connected(job.file.place) as connection:
            answer = self._ask(connection, urlsplit(job.file.place).path, job.part, headers)
            peer = answer.getheader("Location", "") if answer.status == http.client.SEE_OTHER else ""
            if not peer:
                _check_answer(job.file, answer, job.part.length)
                self._append(answer, job, "trainer")
        if peer:
            self._remember(peer)
            self._ask_peer(job, peer)

    def _ask_peer(self, job: _FetchJob, peer: str) -> None:
        """Append what comes; one that fails in any way is not asked for this file again."""
        before = job.part.length
        try:
            with self._connected(peer) as connection:
                answer = self._ask(connection, f"/{job.local_name}", job.part, {})
                _check_answer(job.file, answer, job.part.length)
                self._append(answer, job, "peers")
        except (ConnectionCut, OSError, http.client.HTTPException, WeightsUnreachable, WeightsRefused) as error:
            logger.info("version %d from %s: %r; asking another", job.file.version, peer, error)
            job.avoid.add(peer)
            job.progress.restart()
        finally:
            if job.part.length > before:
                job.sources.add(peer)

    def _remember(self, peer: str) -> None:
        self._peers = [peer, *(known for known in self._peers if known != peer)][:8]

    def _connected(self, place: str) -> contextlib.closing[http.client.HTTPConnection]:
        url = urlsplit(place)
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        return contextlib.closing(kind(url.hostname or "", url.port, timeout=SILENCE_S))

    def _ask(
        self, connection: http.client.HTTPConnection, path: str, part: PartialFile, headers: Mapping[str, str]
    ) -> http.client.HTTPResponse:
        common = {**bearer_headers(self._token), "Range": f"bytes={part.length}-"}
        connection.request("GET", path, headers={**common, **headers})
        return connection.getresponse()

    def _append(self, answer: http.client.HTTPResponse, job: _FetchJob, source: str) -> None:
        """Raises `ConnectionCut` where less came than is missing."""
        while missing := job.file.bytes - job.part.length:
            if self._closed.is_set() or job.progress.problem():
                raise ConnectionCut("broken off here")
            piece = answer.read1(min(PIECE_BYTES, missing))  # what is there: a cut loses nothing that came
            if not piece:
                raise ConnectionCut("the connection ended early")
            job.part.append(piece)
            job.progress.note(job.part.length)
            self.bytes_received[source] += len(piece)

    def _may_go_on(self, job: _FetchJob, fruitless: int, error: Exception) -> None:
        """Wait before the next attempt. Raises `WeightsUnreachable` with the cause if no further attempt is due."""
        if job.part.length == job.file.bytes:
            return
        if fruitless >= ATTEMPTS:
            raise WeightsUnreachable(f"{_cause(job, error)}; given up after {ATTEMPTS} attempts") from error
        logger.warning("%s; going on", _cause(job, error))
        self._pause(job, RECONNECT.pause_s(fruitless + 1), error)

    def _pause(self, job: _FetchJob, pause_s: float, error: Exception) -> None:
        if problem := job.progress.problem(pause_s):
            raise WeightsUnreachable(f"{_cause(job, error)}; {problem}") from error
        if self._closed.wait(pause_s):
            raise WeightsUnreachable(f"{_cause(job, error)}; this server stops") from error


def _on_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def _cause(job: _FetchJob, error: Exception) -> str:
    return f"version {job.file.version}: {job.file.place}: {job.part.length} of {job.file.bytes} bytes: {error!r}"


def _check_answer(file: ChainFile, answer: http.client.HTTPResponse, have: int) -> None:
    """Raises `ConnectionCut` or `FetchBusy` if asking again may help, else `WeightsUnreachable` or `WeightsRefused`."""
    if answer.status == http.client.SERVICE_UNAVAILABLE and answer.getheader("Retry-After"):
        raise FetchBusy("another server is fetching it")
    if 400 <= answer.status < 500 and answer.status != http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
        body = answer.read(200).decode(errors="replace")
        raise WeightsUnreachable(f"version {file.version}: {file.place}: {answer.status} {body}")
    begins = f"bytes {have}-{file.bytes - 1}/{file.bytes}"
    if answer.status == http.client.PARTIAL_CONTENT and answer.getheader("Content-Range") == begins:
        return
    if answer.status >= 500:
        raise ConnectionCut(f"{answer.status} {answer.reason}")
    raise WeightsRefused(
        f"version {file.version}: {file.place} answers {answer.status} {answer.getheader('Content-Range')},"
        f" the manifest promises {begins}"
    )


class Downloader:
    """Owns `directory`. One thread at a time calls `localise`; `close` may come from another.

    `serves` is the URL under which other servers find `directory` (see `peer_server`); without it, the trainer alone
    is asked, and the trainer is not informed.
    """

    def __init__(self, directory: Path, token: str, *, stall_s: float = STALL_S, serves: str = "") -> None:
        self.directory = Path(directory)
        self._stall_s = stall_s
        self._closed = threading.Event()
        self._fetch = FileFetch(token, serves, self._closed)
        self._verified: dict[str, Identity] = {}
        """Files, by name, that this process compared with their checksums."""

    @property
    def bytes_received(self) -> dict[str, int]:
        """Bytes received by source: ``trainer``, ``peers``."""
        return dict(self._fetch.bytes_received)

    def localise(self, manifest: Manifest) -> Manifest:
        """Fetch the files; returns the manifest with their paths here. Manifests of other transports are unchanged.

        Raises `WeightsUnreachable` (no peer answers, or all refuse; a retry may succeed) and `WeightsRefused` (what the
        trainer sends is not what was announced), naming the tensor.
        """
        if manifest.transport not in SERVED:
            return manifest
        try:
            private_folder(self.directory)
            # Before the fetch: a new full version and the old chain need not have room at once.
            needed = {local_name(file) for file in manifest.files}
            for path in self._files():
                if path.name.removesuffix(".part") not in needed:
                    path.unlink(missing_ok=True)
                    self._verified.pop(path.name, None)
            checksums = {entry.name: entry.xxh3 for entry in manifest.tensors}
            here = tuple(self._have(file, checksums) for file in manifest.files)
        except NotPrivate as error:
            raise WeightsUnreachable(f"version {manifest.version}: {error.strerror}") from error
        return replace(manifest, transport="shm", files=here, broadcast="")

    def close(self) -> None:
        """Break off what is under way and delete every file."""
        self._closed.set()
        for path in self._files():
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty: files of others
            self.directory.rmdir()

    def _have(self, file: ChainFile, checksums: Mapping[str, str]) -> ChainFile:
        path = self.directory / local_name(file)
        try:
            known = identity_of(path) == self._verified.get(path.name)
        except FileNotFoundError:
            known = False
        if not known:
            with contextlib.suppress(FileNotFoundError):
                # An earlier life's, or exchanged since: its name proves nothing, so its bytes are compared again.
                path.rename(_part_of(path))
            self._bring(file, path, checksums)
            with contextlib.suppress(FileNotFoundError):  # removed by others: its reader says so
                self._verified[path.name] = identity_of(path)
            self._fetch.tell(file)
        return replace(file, place=str(path))

    def _bring(self, file: ChainFile, path: Path, checksums: Mapping[str, str]) -> None:
        """Until the file is whole and right. One that is not is asked for again, unless all of it is the trainer's."""
        lied: set[str] = set()
        while True:
            with contextlib.closing(PartialFile(_part_of(path))) as part:
                # Of an earlier life, or of other servers: not the trainer's word.
                others = part.length > 0
                sources = self._fetch.run(file, path.name, part, self._stall_s, lied)
                try:
                    verify_whole(file, part, checksums)
                except WeightsRefused as error:
                    if not (sources or others):
                        raise
                    logger.warning("%s; asked for again, not of %s", error, sorted(sources) or "an earlier life")
                    lied = lied | sources
                    continue
                part.path.rename(path)
                return

    def _files(self) -> list[Path]:
        return [path for path in self.directory.glob("*-weights-*") if path.is_file()]


def _part_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def local_name(file: ChainFile) -> str:
    """The checksum comes first: the same name at the trainer may be another file after a restart.

    Raises `WeightsRefused` where the announcement would have us write elsewhere.
    """
    name = urlsplit(file.place).path.rpartition("/")[2]
    if not LOCAL_NAME.fullmatch(f"{file.xxh3}-{name}"):
        about = f"version {file.version}: {file.place!r} with checksum {file.xxh3!r}"
        raise WeightsRefused(f"{about} is not a published file")
    return f"{file.xxh3}-{name}"
