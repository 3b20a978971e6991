"""A server's side of the ``http`` and ``collective`` transports: a version's files, fetched into a folder of its own.

    manifest with URLs ──► each file of its chain that is not here yet ──► manifest with paths, as under ``shm``
                           its own file: from the round, where one is offered; the rest from peers or the trainer

A file arrives in a ``.part`` named after its checksum. Cut off, it goes on from the bytes that are there, also after
this process was killed; whole and with the right checksum, it is renamed. All of it blocks: call it from a thread.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from penstock.weight_sync.chain import SERVED, Link, links_of
from penstock.weight_sync.errors import WeightsRefused
from penstock.weight_sync.file_fetch import FileFetch
from penstock.weight_sync.manifest import build_manifest
from penstock.weight_sync.part import Part, verify_whole
from penstock.weight_sync.publisher import FILE_NAME
from penstock.weight_sync.round_member import receive_in_round

DEADLINE_S = 300.0
LOCAL_NAME = re.compile(r"[0-9a-f]{16}-" + FILE_NAME.pattern)
"""A whole file in a server's folder: other servers may have it from there."""
logger = logging.getLogger(__name__)


class Downloader:
    """Owns `directory`. One thread at a time calls `localise`; `close` may come from another.

    `serves` is the URL under which other servers find `directory` (see `peer_server`); without it, the trainer alone
    is asked, and nobody is told.
    """

    def __init__(self, directory: Path, token: str, *, deadline_s: float = DEADLINE_S, serves: str = "") -> None:
        self.directory = Path(directory)
        self._token = token
        self._deadline_s = deadline_s
        self._closed = threading.Event()
        self._fetch = FileFetch(token, serves, self._closed)
        self._bytes_by_rounds = 0

    @property
    def bytes_received(self) -> dict[str, int]:
        """By source: ``trainer``, ``peers``, ``rounds``."""
        return {**self._fetch.bytes_received, "rounds": self._bytes_by_rounds}

    def localise(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """The manifest, its files on this machine. Those of other transports come back as they are.

        Raises `WeightsUnreachable` (nobody answers, or they refuse; later they may not) and `WeightsRefused` (what the
        trainer sends is not what was announced), naming the tensor.
        """
        if manifest.get("transport") not in SERVED:
            return dict(manifest)
        links = links_of(manifest)
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._forget_others(links)
        give_up_at = time.monotonic() + self._deadline_s
        own = self._have(links[-1], give_up_at, str(manifest.get("round", "")))  # first: a round does not wait
        here = [*(self._have(link, give_up_at) for link in links[:-1]), own]
        kept: dict[str, Any] = {name: manifest[name] for name in ("deltas_follow", "adapter") if name in manifest}
        return build_manifest("shm", here, manifest["tensors"], **kept)

    def close(self) -> None:
        """Break off what is under way and delete every file."""
        self._closed.set()
        for path in self._files():
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty: files of others
            self.directory.rmdir()

    def _have(self, link: Link, give_up_at: float, round_url: str = "") -> Link:
        path = self.directory / local_name(link)
        if not path.is_file():
            self._bring(link, path, give_up_at, round_url)
            self._fetch.tell(link)
        return replace(link, place=str(path))

    def _bring(self, link: Link, path: Path, give_up_at: float, round_url: str) -> None:
        """Until the file is whole and right. One that is not is asked for again, unless all of it is the trainer's."""
        lied: set[str] = set()
        while True:
            with contextlib.closing(Part(path.with_name(f"{path.name}.part"))) as part:
                # Of an earlier life, or of other servers: not the trainer's word.
                others = part.length > 0 or (bool(round_url) and self._take_part(round_url, link, part))
                asked = self._fetch.run(link, path.name, part, give_up_at, lied)
                try:
                    verify_whole(link, part)
                except WeightsRefused as error:
                    if not (asked or others):
                        raise
                    logger.warning("%s; asked for again, not of %s", error, sorted(asked) or "a round")
                    lied, round_url = lied | asked, ""
                    continue
                part.path.rename(path)
                return

    def _take_part(self, url: str, link: Link, part: Part) -> bool:
        """Whether bytes came. Not for a file that is here in part: a round begins at the beginning."""
        came = receive_in_round(url, self._token, link, part, self._closed)
        self._bytes_by_rounds += came
        return came > 0

    def _forget_others(self, links: Sequence[Link]) -> None:
        """Before the fetch: a new full version and the old chain need not have room at once."""
        needed = {local_name(link) for link in links}
        for path in self._files():
            if path.name.removesuffix(".part") not in needed:
                path.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        return [path for path in self.directory.glob("*-weights-*") if path.is_file()]


def local_name(link: Link) -> str:
    """The checksum comes first: the same name at the trainer may be another file after a restart.

    Raises `WeightsRefused` where the announcement would have us write elsewhere.
    """
    name = urlsplit(link.place).path.rpartition("/")[2]
    if not LOCAL_NAME.fullmatch(f"{link.xxh3}-{name}"):
        raise WeightsRefused(f"version {link.version}: {link.place!r} with checksum {link.xxh3!r} is no published file")
    return f"{link.xxh3}-{name}"
