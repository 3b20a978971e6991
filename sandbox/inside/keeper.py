"""Between the driver of a managed sandbox and the worker, whose connection may break: no request is lost or done twice.

    worker ──lines over the provider's API──► relay ──socket──► keeper ──frames──► driver

A line is a frame's JSON. The keeper passes a request on once, by its ``id``, and keeps the frames that answer it; a
request that comes again, over a new connection, gets those that its sender lacks (``have``: how many it has). A newer
connection takes the place of an older one. A served run cannot be continued: with its connection the box ends.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
from typing import Any

from penstock.sandbox.inside import children, driver, relay

KEPT_BYTES = 8 << 20
"""Limit of the stored answers; the newest is stored whatever its size."""
CHUNK_BYTES = 1 << 16


class Peer:
    """A connection to a reader that may be slow: unsent bytes are kept and sent later."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.received = bytearray()
        self.unsent = bytearray()

    def events(self) -> int:
        return select.POLLIN | (select.POLLOUT if self.unsent else 0)

    def read(self) -> bool:
        """False once the other end is gone."""
        try:
            data = self.connection.recv(CHUNK_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.received += data
        return bool(data)

    def send(self, data: bytes) -> None:
        self.unsent += data
        self.flush()

    def flush(self) -> None:
        try:
            while self.unsent:
                del self.unsent[: self.connection.send(self.unsent[:CHUNK_BYTES])]
        except OSError:  # it is full, or gone, which the next read says
            return


class Keeper:
    """One loop: whatever arrives is passed on."""

    def __init__(self, listener: socket.socket, control: socket.socket) -> None:
        self._listener = listener
        self._driver = Peer(control)
        self._client: Peer | None = None
        self._answers: dict[int, list[bytes]] = {}
        """Request → the lines that answer it, in the order of asking."""
        self._greeting = b""
        """The driver's ready frame, until a client connects."""
        self._running: int | None = None
        self._heard: int | None = None
        """The request that the connection of now has asked for: it gets those answers as they come. Who has not asked
        would get them twice, now and when it asks."""
        self._served = False

    def serve(self) -> None:
        """Until the driver ends."""
        while True:
            poller = select.poll()
            poller.register(self._listener, select.POLLIN)
            poller.register(self._driver.connection, self._driver.events())
            if self._client is not None:
                poller.register(self._client.connection, self._client.events())
            ready = {fd for fd, _ in poller.poll()}
            if self._driver.connection.fileno() in ready and not self._hear_driver():
                return
            client = self._client
            if client is not None and client.connection.fileno() in ready and not self._hear_client(client):
                return
            if self._listener.fileno() in ready:
                if self._served:
                    return
                self._replace(Peer(self._listener.accept()[0]))

    def _replace(self, client: Peer | None) -> None:
        if self._client is not None:
            self._client.connection.close()
        self._client, self._heard = client, None
        if client is not None:
            client.send(self._greeting)
            self._greeting = b""

    def _hear_client(self, client: Peer) -> bool:
        client.flush()
        if not client.read():
            self._replace(None)
            return not self._served
        while b"\n" in client.received:
            line, _, rest = bytes(client.received).partition(b"\n")
            client.received = bytearray(rest)
            self._take(json.loads(line))
        return True

    def _take(self, frame: dict[str, Any]) -> None:
        if "do" not in frame:
            if self._served:  # else for a connection of a run that has ended
                self._to_driver(frame)
            return
        number, have = frame["id"], frame.pop("have", 0)
        self._heard = number
        if number in self._answers:
            self._to_client(b"".join(self._answers[number][have:]))
            return
        self._answers[number] = []
        self._forget_old()
        self._running, self._served = number, bool(frame.get("serve"))
        self._to_driver(frame)

    def _forget_old(self) -> None:
        sizes = {number: sum(map(len, lines)) for number, lines in self._answers.items()}
        for number in list(sizes)[:-1]:
            if sum(sizes.values()) <= KEPT_BYTES:
                return
            del sizes[number], self._answers[number]

    def _to_driver(self, frame: dict[str, Any]) -> None:
        body = json.dumps(frame).encode("ascii")
        self._driver.send(driver.LENGTH.pack(len(body)) + body)

    def _hear_driver(self) -> bool:
        self._driver.flush()
        living = self._driver.read()
        data = self._driver.received
        while len(data) >= driver.LENGTH.size:
            end = driver.LENGTH.size + driver.LENGTH.unpack_from(data)[0]
            if len(data) < end:
                break
            self._pass_on(bytes(data[driver.LENGTH.size : end]) + b"\n")
            del data[:end]
        return living

    def _pass_on(self, line: bytes) -> None:
        frame = json.loads(line)
        if "ready" in frame and self._client is None:
            self._greeting = line
        if frame.get("id") == self._running and self._running is not None:
            self._answers[self._running].append(line)
            if "out" not in frame:
                self._running, self._served = None, False
        if frame.get("id", self._heard) == self._heard:
            self._to_client(line)

    def _to_client(self, data: bytes) -> None:
        if self._client is not None:
            self._client.send(data)


def main() -> None:
    """Argument 1: the driver's settings, with the keeper's ``name``. Starts both, then is the first relay to them."""
    settings = json.loads(sys.argv[1])
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("\0" + settings["name"])
    listener.listen(4)
    if os.fork() == 0:
        os.setsid()
        run_box(settings, listener)
    listener.close()
    relay.run(settings["name"])


def run_box(settings: dict[str, Any], listener: socket.socket) -> None:
    """Run a box in a process that outlives the connection that started it; ends with the driver."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):  # the provider's pipes: open, they would keep the first connection from ending
        os.dup2(null, number)
    os.environ.setdefault(settings["workdir_variable"], os.getcwd())
    os.chdir("/tmp")  # noqa: S108 - the box's own
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        listener.close()
        os.dup2(theirs.fileno(), 0)
        theirs.close()
        driver.serve(settings, None)
        os._exit(0)
    theirs.close()
    children.set_dumpable(False)
    Keeper(listener, ours).serve()
    os._exit(0)
