"""The connection to the worker as the driver sees it. A frame is 4 bytes of length (big endian), then JSON."""

from __future__ import annotations

import json
import os
import select
import struct
from collections.abc import Callable
from typing import Any

LENGTH = struct.Struct(">I")


class Hangup(Exception):
    """The worker is gone."""


class Control:
    def __init__(self, fd: int, answers: int) -> None:
        """`fd`: where commands come from; `answers`: where answers go, the same where it is a socket."""
        self.fd = fd
        self.answers = answers

    def receive(self, wakeup: int, reap: Callable[[], Any]) -> dict[str, Any]:
        """The next command; reaps what ends meanwhile, so that zombies do not fill the box's process limit."""
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        poller.register(wakeup, select.POLLIN)
        while self.fd not in [fd for fd, _ in poller.poll()]:
            reap()
        (size,) = LENGTH.unpack(self._read_exactly(LENGTH.size))
        command: dict[str, Any] = json.loads(self._read_exactly(size))
        return command

    def _read_exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            chunk = os.read(self.fd, min(size - len(data), 1 << 20))
            if not chunk:
                raise Hangup
            data += chunk
        return bytes(data)

    def send(self, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode("ascii")
        data = LENGTH.pack(len(body)) + body
        while data:
            data = data[os.write(self.answers, data) :]

    def hang_up(self) -> bool:
        """The worker sends nothing during a run: readable means gone."""
        raise Hangup
