"""Commands and replies of one connection, as Redis's protocol has them.

redis-py connects, encrypts and logs in; then a `Wire` takes its socket over. What arrives is parsed by hiredis from
one buffer of the `Node`: a StreamReader between them would copy every byte twice more, and each reply would cost the
calls of redis-py's connection. A long string is received in its final place: through hiredis it would be copied twice,
and its reader would be woken for every piece.

    socket ──► buffer of the node ──► hiredis ──► reply
        └────► a separate buffer, once the node's buffer began with the head of a long string ──► reply
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

import hiredis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import DataError, InvalidResponse

from penstock.transfer_queue.codec.packing import Packed

READ_BYTES = 1 << 16
"""Size of a node's buffer. A string of at least this length is received in its final place."""
_NOTHING = object()
_NOT_COPIED = frozenset({Packed, memoryview})


def pack_commands(commands: Sequence[Sequence[Any]]) -> list[Any]:
    """The commands as buffers in order; those of a packed payload, and memoryviews, are not copied.

    Raises `DataError` for an argument that is not text, number or bytes.
    """
    chunks: list[Any] = []
    for command in commands:
        try:
            if _NOT_COPIED.isdisjoint(map(type, command)):
                chunks.append(hiredis.pack_command(tuple(command)))
            else:
                chunks += _gathered(command)
        except TypeError as error:
            raise DataError(f"{command[0]}: {error}") from error
    return chunks


def _gathered(command: Sequence[Any]) -> list[Any]:
    chunks: list[Any] = [b"*%d\r\n" % len(command)]
    for arg in command:
        if type(arg) is Packed:
            chunks += [b"$%d\r\n" % arg.size, *arg.buffers, b"\r\n"]
        elif type(arg) is memoryview:
            chunks += [b"$%d\r\n" % arg.nbytes, arg, b"\r\n"]
        elif isinstance(arg, str):
            plain = arg.encode()
            chunks.append(b"$%d\r\n%b\r\n" % (len(plain), plain))
        else:
            raise TypeError(f"{type(arg).__name__} next to a payload")
    return chunks


class Wire(asyncio.BufferedProtocol):
    """One caller at a time, which reads a reply for each command that it sent. `connection` stays the owner of the
    socket: it closes it."""

    def __init__(self, connection: AbstractConnection, buffer: bytearray) -> None:
        """`connection` is logged in and has no reply outstanding. `buffer` may serve several wires of one event loop:
        what it holds is parsed before it is filled again."""
        assert connection._writer is not None  # it is connected
        parse_error = connection._parser.parse_error
        self._parser: Any = hiredis.Reader(
            protocolError=InvalidResponse, replyError=parse_error, notEnoughData=_NOTHING
        )
        self._buffer = buffer
        self._view = memoryview(buffer)
        self._long: memoryview | None = None
        """The long string that is being received, and its line end."""
        self._filled = 0
        """Bytes of it that have arrived."""
        self._received: deque[memoryview] = deque()
        """Long strings that were not read yet; what `_parser` holds came after them."""
        self._parsing = False
        """hiredis was fed since its last whole reply, or holds more than that: what comes next may be in the middle of
        a reply, or after one that was not read."""
        self._arrived: asyncio.Future[None] | None = None
        self._failure: Exception | None = None
        self._transport = connection._writer.transport
        self._transport.set_protocol(self)

    def send(self, chunks: Sequence[Any]) -> None:
        """Raises what ended the connection."""
        if self._failure is not None:
            raise self._failure
        self._transport.writelines(chunks)

    async def reply(self) -> Any:
        """The next reply; Redis's refusal is returned, not raised; a long string is a read-only memoryview. Raises what
        ended the connection."""
        while (reply := self._next()) is _NOTHING:
            if self._failure is not None:
                raise self._failure
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        return reply

    def _next(self) -> Any:
        if self._received:
            return self._received.popleft()
        reply = self._parser.gets()
        if reply is not _NOTHING:
            self._parsing = self._parser.has_data()
        return reply

    def abort(self) -> None:
        """Ends the connection without the commands that are not sent yet."""
        self._transport.abort()

    # called by the transport ---------------------------------------------------------------------------------------
    def get_buffer(self, sizehint: int) -> memoryview:
        if self._long is not None:
            return self._long[self._filled :]
        return self._view  # TLS fills slices of it: those of a bytearray would be copies

    def buffer_updated(self, nbytes: int) -> None:
        if self._long is not None:
            self._filled += nbytes
            if self._filled < len(self._long):
                return
            if self._long[-2:] == b"\r\n":
                self._received.append(self._long[:-2].toreadonly())
            else:
                problem = f"a string of {len(self._long) - 2} bytes is not followed by a line end"
                self._failure = InvalidResponse(problem)
            self._long = None
        elif length := self._long_begins(nbytes):
            head = self._buffer.index(b"\n") + 1
            self._long = memoryview(bytearray(length + 2))
            self._filled = nbytes - head
            self._long[: self._filled] = self._view[head:nbytes]
            return
        else:
            self._parser.feed(self._buffer, 0, nbytes)
            self._parsing = True
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._failure = exc if isinstance(exc, OSError) else RedisConnectionError("Connection closed by server.")
        self._wake()

    def _long_begins(self, nbytes: int) -> int:
        """Length of the long string whose head the buffer begins with, if it is a reply by itself; else 0."""
        if self._parsing or self._buffer[0] != ord("$"):
            return 0
        length, end, _ = bytes(self._view[1 : min(nbytes, 16)]).partition(b"\r\n")  # a head is shorter than 16 bytes
        return int(length) if end and length.isdigit() and int(length) >= READ_BYTES else 0

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)
