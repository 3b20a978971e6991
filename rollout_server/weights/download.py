"""A server's side of the ``http`` transport: the files of a version, fetched into a folder of its own.

    manifest with URLs ──► each file of its chain that is not here yet ──► manifest with paths, as under ``shm``

A file arrives in a ``.part`` named after its checksum. Cut off, it goes on from the bytes that are there, also after
this process was killed; whole and with the right checksum, it is renamed. All of it blocks: call it from a thread.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from penstock.rollout_server.protocol import WeightsRefused, WeightsUnreachable
from penstock.rollout_server.weights.chain import Link, links_of
from penstock.rollout_server.weights.manifest import build_manifest
from penstock.rollout_server.weights.part import PIECE_BYTES, Part, verify_whole
from penstock.rollout_server.weights.publisher import FILE_NAME

DEADLINE_S = 300.0
SILENCE_S = 15.0
ATTEMPTS = 5
"""Connections in a row that bring nothing before it is given up."""
PAUSE_S = 0.1
"""After the first of them; doubled with each."""

logger = logging.getLogger(__name__)


class Cut(Exception):
    """The connection broke, or never was; the message says how. What came before counts."""


class Downloader:
    """Owns `directory`. One thread at a time calls `localise`; `close` may come from another."""

    def __init__(self, directory: Path, token: str, *, deadline_s: float = DEADLINE_S) -> None:
        self.directory = Path(directory)
        self._token = token
        self._deadline_s = deadline_s
        self._closed = threading.Event()
        self.bytes_received = 0

    def localise(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """The manifest, its files on this machine. Those of other transports come back as they are.

        Raises `WeightsUnreachable` (the trainer does not answer, or refuses; later it may not) and `WeightsRefused`
        (what it sends is not what was announced), naming the tensor.
        """
        if manifest.get("transport") != "http":
            return dict(manifest)
        links = links_of(manifest)
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._forget_others(links)
        give_up_at = time.monotonic() + self._deadline_s
        here = [self._have(link, give_up_at) for link in links]
        deltas_follow = bool(manifest.get("deltas_follow"))
        return build_manifest("shm", here, manifest["tensors"], deltas_follow=deltas_follow)

    def close(self) -> None:
        """Break off what is under way and delete every file."""
        self._closed.set()
        for path in self._files():
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty: files of others
            self.directory.rmdir()

    def _have(self, link: Link, give_up_at: float) -> Link:
        path = self.directory / _local_name(link)
        if not path.is_file():
            with contextlib.closing(Part(path.with_name(f"{path.name}.part"))) as part:
                self._fetch(link, part, give_up_at)
                verify_whole(link, part)
                part.path.rename(path)
        return replace(link, place=str(path))

    def _fetch(self, link: Link, part: Part, give_up_at: float) -> None:
        """Until `part` is as long as it must be; connections that bring something may follow each other freely."""
        fruitless = 0
        while (have := part.length) < link.bytes:
            try:
                self._receive(link, part, give_up_at)
            except (Cut, OSError, http.client.HTTPException) as error:
                fruitless = fruitless + 1 if part.length == have else 0
                self._may_go_on(link, part.length, fruitless, give_up_at, error)

    def _may_go_on(self, link: Link, have: int, fruitless: int, give_up_at: float, error: Exception) -> None:
        """Wait before the next attempt. Raises `WeightsUnreachable` with the cause where there is to be none."""
        cause = f"version {link.version}: {link.place}: {have} of {link.bytes} bytes: {error!r}"
        pause_s = PAUSE_S * 2**fruitless
        if fruitless >= ATTEMPTS:
            raise WeightsUnreachable(f"{cause}; given up after {ATTEMPTS} attempts") from error
        if time.monotonic() + pause_s > give_up_at:
            raise WeightsUnreachable(f"{cause}; not done in {self._deadline_s:g} s") from error
        logger.warning("%s; going on", cause)
        if self._closed.wait(pause_s):
            raise WeightsUnreachable(f"{cause}; this server stops") from error

    def _receive(self, link: Link, part: Part, give_up_at: float) -> None:
        """One connection: append what comes. Raises `Cut` where less came than is missing."""
        url = urlsplit(link.place)
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = kind(url.hostname or "", url.port, timeout=SILENCE_S)
        with contextlib.closing(connection):
            headers = {"Authorization": f"Bearer {self._token}", "Range": f"bytes={part.length}-"}
            connection.request("GET", url.path, headers=headers)
            answer = connection.getresponse()
            _check_answer(link, answer, part.length)
            self._append(answer, part, link.bytes, give_up_at)

    def _append(self, answer: http.client.HTTPResponse, part: Part, length: int, give_up_at: float) -> None:
        while missing := length - part.length:
            if self._closed.is_set() or time.monotonic() > give_up_at:
                raise Cut("broken off here")
            piece = answer.read1(min(PIECE_BYTES, missing))  # what is there: a cut loses nothing that came
            if not piece:
                raise Cut("the connection ended early")
            part.append(piece)
            self.bytes_received += len(piece)

    def _forget_others(self, links: Sequence[Link]) -> None:
        """Before the fetch: a new full version and the old chain need not have room at once."""
        needed = {_local_name(link) for link in links}
        for path in self._files():
            if path.name.removesuffix(".part") not in needed:
                path.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        return [path for path in self.directory.glob("*-weights-*") if path.is_file()]


def _local_name(link: Link) -> str:
    """The checksum comes first: the same name at the trainer may be another file after a restart.

    Raises `WeightsRefused` where the announcement would have us write elsewhere.
    """
    name = urlsplit(link.place).path.rpartition("/")[2]
    if not FILE_NAME.fullmatch(name) or not re.fullmatch("[0-9a-f]{16}", link.xxh3):
        raise WeightsRefused(f"version {link.version}: {link.place!r} with checksum {link.xxh3!r} is no published file")
    return f"{link.xxh3}-{name}"


def _check_answer(link: Link, answer: http.client.HTTPResponse, have: int) -> None:
    """Raises `WeightsUnreachable` where asking again would not help, `Cut` where it may, `WeightsRefused`."""
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
