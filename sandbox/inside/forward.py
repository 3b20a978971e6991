"""A port of the box's loopback whose connections the worker serves: the driver carries them in separate frames.

    program ──TCP──► driver ──frames──► worker

    {"conn": 3, "data": "…"}    bytes, base64; the first frame of a connection opens it
    {"conn": 3, "ack": 4096}    this many bytes were passed on: as many may follow
    {"conn": 3, "end": true}    nothing follows from this side
    {"conn": 3, "gone": true}   the connection is closed
    {"stop": true}              from the worker: ends the run

Neither side sends more than WINDOW_BYTES of a connection that the other has not passed on, so a program that floods or
does not read fills neither. Connections beyond MAX_CONNECTIONS wait in the kernel's queue, which is bounded too.
"""

from __future__ import annotations

import base64
import contextlib
import select
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket

WINDOW_BYTES = 128 << 10
CHUNK_BYTES = 32 << 10
SHUT_WR = 1
MAX_CONNECTIONS = 64
Frame = dict[str, Any]


class ForwardedStream:
    """One connection of a program. Level-triggered; watched only for what may happen."""

    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number = number
        self.connection = connection
        self.unacknowledged = 0
        """Bytes sent to the worker that it has not passed on yet."""
        self.full = True
        """The last read took all that it asked for. After another one, the next waits until the worker has passed on
        all: bytes that trickle in meanwhile come as one frame."""
        self.pending = bytearray()
        """Bytes for the program."""
        self.program_ended = False
        self.worker_ended = False
        self.closing = False
        """The worker has closed it: it ends once `pending` is written and the program has read that."""
        self.discarded = 0
        """Bytes from the program after that. Closed with unread bytes, a socket would take back the answer."""

    @property
    def wanted(self) -> int:
        """Events that epoll is asked for; 0: nothing may happen now."""
        room = self.unacknowledged < WINDOW_BYTES and (self.full or not self.unacknowledged)
        reads = not self.program_ended and (self.closing or room)
        return (select.EPOLLIN if reads else 0) | (select.EPOLLOUT if self.pending else 0)

    @property
    def over(self) -> bool:
        if self.pending:
            return False
        return (self.program_ended and (self.closing or self.worker_ended)) or self.discarded > (1 << 20)


class ForwardedPort:
    """At most one port; its connections are accepted and carried while a run is served."""

    def __init__(self, send: Callable[[Frame], None]) -> None:
        self.stopped = False
        """The worker has asked for the run's end."""
        self._send = send
        self._listener: socket.socket | None = None
        self._epoll: select.epoll | None = None
        self._streams: dict[int, ForwardedStream] = {}
        """Streams by number; a number is used once."""
        self._by_fd: dict[int, ForwardedStream] = {}
        self._watched: dict[int, int] = {}
        """Descriptor → what epoll is asked for."""
        self._next = 0

    def open(self) -> int:
        """The port's number, the same each time. Raises `OSError`."""
        if self._listener is None:
            import socket  # only boxes that are served pay for it

            self._epoll = select.epoll()
            self._listener = socket.create_server(("127.0.0.1", 0), backlog=MAX_CONNECTIONS)
            self._listener.setblocking(False)
        return int(self._listener.getsockname()[1])

    def begin(self) -> int:
        """A descriptor that is readable when `ready` has something to do. Raises `OSError` where no port is open."""
        if self._listener is None or self._epoll is None:
            raise OSError(107, "no port is open in this box")
        self.stopped = False
        self._watch_listener()
        return self._epoll.fileno()

    def end(self) -> None:
        """Closes every connection of the run, also those that were not accepted yet."""
        for stream in list(self._streams.values()):
            self._close(stream)
        if self._listener is not None:
            self._watch(self._listener.fileno(), 0)
            with contextlib.suppress(OSError):
                for _ in range(2 * MAX_CONNECTIONS):
                    self._listener.accept()[0].close()

    # ---- what epoll and the worker say; True: keep watching

    def ready(self) -> bool:
        assert self._epoll is not None
        assert self._listener is not None
        for fd, _ in self._epoll.poll(0):
            if fd == self._listener.fileno():
                self._accept()
            elif fd in self._by_fd:
                self._move(self._by_fd[fd])
        return True

    def take(self, frame: Frame) -> bool:
        """A frame of the worker's."""
        self.stopped = self.stopped or bool(frame.get("stop"))
        stream = self._streams.get(frame.get("conn", -1))
        if stream is None:
            return True
        stream.pending += base64.b64decode(frame.get("data", ""))
        stream.unacknowledged -= frame.get("ack", 0)
        stream.worker_ended = stream.worker_ended or bool(frame.get("end"))
        stream.closing = stream.closing or bool(frame.get("gone"))
        self._move(stream, reads=False)
        return True

    # ---- connections

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the program has left already
            return
        connection.setblocking(False)
        self._next += 1
        stream = ForwardedStream(self._next, connection)
        self._streams[stream.number] = self._by_fd[connection.fileno()] = stream
        self._send({"conn": stream.number, "data": ""})
        self._watch(connection.fileno(), stream.wanted)
        self._watch_listener()

    def _move(self, stream: ForwardedStream, reads: bool = True) -> None:
        """Bytes both ways, as far as they go."""
        try:
            if reads and stream.wanted & select.EPOLLIN:
                self._read(stream)
            if stream.pending:
                self._write(stream)
            if (stream.closing or stream.worker_ended) and not stream.pending:
                stream.connection.shutdown(SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:  # reset by the program
            self._send({"conn": stream.number, "gone": True})
            self._close(stream)
            return
        if stream.over:
            self._close(stream)
        else:
            self._watch(stream.connection.fileno(), stream.wanted)

    def _read(self, stream: ForwardedStream) -> None:
        size = CHUNK_BYTES if stream.closing else min(CHUNK_BYTES, WINDOW_BYTES - stream.unacknowledged)
        try:
            data = stream.connection.recv(size)
        except BlockingIOError:
            return
        stream.program_ended, stream.full = not data, len(data) == size
        if stream.closing:
            stream.discarded += len(data)
            return
        stream.unacknowledged += len(data)
        if data:
            self._send({"conn": stream.number, "data": base64.b64encode(data).decode("ascii")})
        else:
            self._send({"conn": stream.number, "end": True})

    def _write(self, stream: ForwardedStream) -> None:
        count = stream.connection.send(stream.pending)
        del stream.pending[:count]
        self._send({"conn": stream.number, "ack": count})

    def _close(self, stream: ForwardedStream) -> None:
        self._watch(stream.connection.fileno(), 0)
        del self._streams[stream.number], self._by_fd[stream.connection.fileno()]
        stream.connection.close()
        self._watch_listener()

    def _watch_listener(self) -> None:
        assert self._listener is not None
        full = len(self._streams) >= MAX_CONNECTIONS
        self._watch(self._listener.fileno(), 0 if full else select.EPOLLIN)

    def _watch(self, fd: int, events: int) -> None:
        """Asked for nothing, a descriptor is left out: epoll would report its hang-up again and again."""
        assert self._epoll is not None
        known = self._watched.get(fd, 0)
        if events == known:
            return
        if not events:
            del self._watched[fd]
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)
            return
        self._watched[fd] = events
        if known:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
