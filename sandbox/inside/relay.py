"""Stdin and stdout of a program that a managed sandbox runs, joined to the box's keeper (`keeper.py`).

Also run by itself, as text after ``python3 -c``, by each new connection: it imports nothing of ours.
"""

from __future__ import annotations

import os
import select
import socket
import sys

CHUNK_BYTES = 1 << 16


def connect(name: str) -> socket.socket:
    """To the keeper of the box. Raises OSError if it has ended."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect("\0" + name)
    return connection


def copy(connection: socket.socket) -> None:
    """Stdin to the keeper, and what it sends to stdout, until either of them ends."""
    poller = select.poll()
    poller.register(0, select.POLLIN)
    poller.register(connection, select.POLLIN)
    while True:
        for fd, _ in poller.poll():
            data = os.read(fd, CHUNK_BYTES)
            if not data:
                return
            if fd == 0:
                connection.sendall(data)
            else:
                write(data)


def write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


def run(name: str) -> None:
    try:
        copy(connect(name))
    except OSError as error:
        sys.exit(f"the box's driver has ended: {error}")


def main() -> None:
    """Argument 1: the keeper's name."""
    run(sys.argv[1])
