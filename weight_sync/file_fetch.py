"""One published file over HTTP, from whoever has it: other servers before the trainer.

    trainer ── 206 ──► its bytes                          nobody else has the file yet
            ── 303 ──► a peer's bytes                     it has fetched and verified it
            ── 503 ──► ask again soon                     who has it is busy, or it is just being fetched by the first
    trainer away ────► peers that it named earlier

A connection that breaks goes on from the bytes that are there, at whoever is next. All of it blocks.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from penstock.weight_sync.chain import Link
from penstock.weight_sync.errors import WeightsRefused, WeightsUnreachable
from penstock.weight_sync.part import PIECE_BYTES, Part
from penstock.weight_sync.turns import AVOID, SERVES

SILENCE_S = 15.0
ATTEMPTS = 5
"""Connections in a row that bring nothing before it is given up."""
PAUSE_S = 0.1
"""After the first of them; doubled with each. Also between two questions whether it is our turn."""
PEERS_KNOWN = 8
logger = logging.getLogger(__name__)


class Cut(Exception):
    """The connection broke, or never was; the message says how. What came before counts."""


class NotYet(Exception):
    """The trainer asks for patience: another server is fetching the file."""


@dataclass
class _Job:
    """One file that is being fetched."""

    link: Link
    local_name: str
    part: Part
    give_up_at: float
    avoid: set[str]
    """Peers that failed us with this file."""
    asked: set[str] = field(default_factory=set)
    """Peers that bytes came from."""


class FileFetch:
    """Knows the peers that it was told of. One thread at a time calls `run`."""

    def __init__(self, token: str, serves: str, closed: threading.Event) -> None:
        self._token, self._serves, self._closed = token, serves, closed
        self._peers: list[str] = []
        """Newest first."""
        self.bytes_received = {"trainer": 0, "peers": 0}

    def run(self, link: Link, local_name: str, part: Part, give_up_at: float, avoid: set[str]) -> set[str]:
        """Until `part` is as long as it must be; the peers that it came from. `local_name` is the file's name there.

        Connections that bring something may follow each other freely. Raises `WeightsUnreachable`, `WeightsRefused`.
        """
        job = _Job(link, local_name, part, give_up_at, set(avoid))
        fruitless = 0
        while (have := part.length) < link.bytes:
            try:
                self._ask_trainer(job)
            except NotYet as error:
                self._pause(job, PAUSE_S, error)
            except (Cut, OSError, http.client.HTTPException) as error:
                self._ask_known_peers(job)
                fruitless = fruitless + 1 if part.length == have else 0
                self._may_go_on(job, fruitless, error)
        return job.asked

    def tell(self, link: Link) -> None:
        """The trainer may send others here for this file. Not heard, it costs a download there."""
        if not (serves := self._offer(link)):
            return
        try:
            with self._connected(link.place) as connection:
                headers = {"Authorization": f"Bearer {self._token}", SERVES: serves}
                connection.request("PUT", urlsplit(link.place).path, headers=headers)
                connection.getresponse().read()
        except (OSError, http.client.HTTPException) as error:
            logger.info("the trainer does not know that version %d is here: %r", link.version, error)

    def _offer(self, link: Link) -> str:
        """What we tell the trainer. On loopback we are of use only to a trainer, and its servers, on this machine."""
        return self._serves if _on_loopback(self._serves) <= _on_loopback(link.place) else ""

    def _ask_trainer(self, job: _Job) -> None:
        """Append what comes, from the trainer or from the peer that it names."""
        serves = self._offer(job.link)
        headers = {SERVES: serves, AVOID: ",".join(sorted(job.avoid))} if serves else {}
        with self._connected(job.link.place) as connection:
            answer = self._ask(connection, urlsplit(job.link.place).path, job.part, headers)
            peer = answer.getheader("Location", "") if answer.status == http.client.SEE_OTHER else ""
            if not peer:
                _check_answer(job.link, answer, job.part.length)
                self._append(answer, job, "trainer")
        if peer:
            self._remember(peer)
            self._ask_peer(job, peer)

    def _ask_known_peers(self, job: _Job) -> None:
        for peer in self._peers:
            if job.part.length < job.link.bytes and peer not in job.avoid and not self._closed.is_set():
                self._ask_peer(job, peer)

    def _ask_peer(self, job: _Job, peer: str) -> None:
        """Append what comes; one that fails in any way is not asked for this file again."""
        before = job.part.length
        try:
            with self._connected(peer) as connection:
                answer = self._ask(connection, f"/{job.local_name}", job.part, {})
                _check_answer(job.link, answer, job.part.length)
                self._append(answer, job, "peers")
        except (Cut, OSError, http.client.HTTPException, WeightsUnreachable, WeightsRefused) as error:
            logger.info("version %d from %s: %r; asking another", job.link.version, peer, error)
            job.avoid.add(peer)
        finally:
            if job.part.length > before:
                job.asked.add(peer)

    def _remember(self, peer: str) -> None:
        self._peers = [peer, *(known for known in self._peers if known != peer)][:PEERS_KNOWN]

    def _connected(self, place: str) -> contextlib.closing[http.client.HTTPConnection]:
        url = urlsplit(place)
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        return contextlib.closing(kind(url.hostname or "", url.port, timeout=SILENCE_S))

    def _ask(
        self, connection: http.client.HTTPConnection, path: str, part: Part, headers: Mapping[str, str]
    ) -> http.client.HTTPResponse:
        common = {"Authorization": f"Bearer {self._token}", "Range": f"bytes={part.length}-"}
        connection.request("GET", path, headers={**common, **headers})
        return connection.getresponse()

    def _append(self, answer: http.client.HTTPResponse, job: _Job, source: str) -> None:
        """Raises `Cut` where less came than is missing."""
        while missing := job.link.bytes - job.part.length:
            if self._closed.is_set() or time.monotonic() > job.give_up_at:
                raise Cut("broken off here")
            piece = answer.read1(min(PIECE_BYTES, missing))  # what is there: a cut loses nothing that came
            if not piece:
                raise Cut("the connection ended early")
            job.part.append(piece)
            self.bytes_received[source] += len(piece)

    def _may_go_on(self, job: _Job, fruitless: int, error: Exception) -> None:
        """Wait before the next attempt. Raises `WeightsUnreachable` with the cause where there is to be none."""
        if job.part.length == job.link.bytes:
            return
        if fruitless >= ATTEMPTS:
            raise WeightsUnreachable(f"{_cause(job, error)}; given up after {ATTEMPTS} attempts") from error
        logger.warning("%s; going on", _cause(job, error))
        self._pause(job, PAUSE_S * 2**fruitless, error)

    def _pause(self, job: _Job, pause_s: float, error: Exception) -> None:
        if time.monotonic() + pause_s > job.give_up_at:
            raise WeightsUnreachable(f"{_cause(job, error)}; not done in time") from error
        if self._closed.wait(pause_s):
            raise WeightsUnreachable(f"{_cause(job, error)}; this server stops") from error


def _on_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def _cause(job: _Job, error: Exception) -> str:
    return f"version {job.link.version}: {job.link.place}: {job.part.length} of {job.link.bytes} bytes: {error!r}"


def _check_answer(link: Link, answer: http.client.HTTPResponse, have: int) -> None:
    """Raises `Cut` or `NotYet` where asking again may help, else `WeightsUnreachable` or `WeightsRefused`."""
    if answer.status == http.client.SERVICE_UNAVAILABLE and answer.getheader("Retry-After"):
        raise NotYet("another server is fetching it")
    if 400 <= answer.status < 500 and answer.status != http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
        said = answer.read(200).decode(errors="replace")
        raise WeightsUnreachable(f"version {link.version}: {link.place}: {answer.status} {said}")
    begins = f"bytes {have}-{link.bytes - 1}/{link.bytes}"
    if answer.status == http.client.PARTIAL_CONTENT and answer.getheader("Content-Range") == begins:
        return
    if answer.status >= 500:
        raise Cut(f"{answer.status} {answer.reason}")
    raise WeightsRefused(
        f"version {link.version}: {link.place} answers {answer.status} {answer.getheader('Content-Range')},"
        f" the manifest promises {begins}"
    )
