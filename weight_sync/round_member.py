"""A server's side of a round: a seat, then the file's bytes as they come, into its `Part`.

Whatever goes wrong, the bytes that came count, and the rest is fetched over HTTP. All of it blocks.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import threading
from dataclasses import dataclass
from urllib.parse import urlsplit

from penstock.weight_sync.chain import Link
from penstock.weight_sync.part import Part
from penstock.weight_sync.round_group import RoundGroup, Seat, find_store, receive_file

JOIN_S = 10.0
"""The window is far shorter; a trainer that stopped answering is not waited for."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Place:
    seat: Seat
    trainer: str
    """Host where the trainer was reached."""
    here: str
    """This machine's address on the way there."""


def receive_in_round(url: str, token: str, link: Link, part: Part, closed: threading.Event) -> int:
    """Take part in the round at `url` for `link`'s file. The number of bytes that came, 0 without a seat."""
    before = part.length
    try:
        place = _join(url, token)
        if place is not None:
            _receive(place, link, part, closed)
    except (OSError, http.client.HTTPException, RuntimeError, ValueError) as error:
        logger.warning(
            "version %d: the round ended with %d of %d bytes, the rest comes over HTTP: %s",
            link.version, part.length, link.bytes, error,
        )  # fmt: skip
    return part.length - before


def _join(url: str, token: str) -> _Place | None:
    """None where the round goes on without this server."""
    target = urlsplit(url)
    kind = http.client.HTTPSConnection if target.scheme == "https" else http.client.HTTPConnection
    connection = kind(target.hostname or "", target.port, timeout=JOIN_S)
    with contextlib.closing(connection):
        connection.connect()
        here = connection.sock.getsockname()[0]
        connection.request("POST", target.path, headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            logger.info("no seat: %d %s", answer.status, answer.read(200).decode(errors="replace"))
            return None
        return _Place(_seat(json.loads(answer.read())), target.hostname or "", here)


def _seat(fields: object) -> Seat:
    """Raises `ValueError` where the trainer's answer is no seat."""
    try:
        return Seat(**fields)  # type: ignore[arg-type]
    except TypeError as error:
        raise ValueError(f"the trainer's answer is no seat: {error}") from error


def _receive(place: _Place, link: Link, part: Part, closed: threading.Event) -> None:
    store = find_store(place.trainer, place.seat)
    with contextlib.closing(RoundGroup(store, place.seat, place.here)) as group:
        for piece in receive_file(group, link.bytes, place.seat.bucket_bytes):
            part.append(piece)
            if closed.is_set():
                raise RuntimeError("this server stops")
        group.say_done()
