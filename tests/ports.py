"""Ports for servers of tests."""

from __future__ import annotations

import secrets
import socket


def free_port() -> int:
    """A port on loopback that nothing uses at this moment, and that the kernel gives to no connection: a server of a
    test that starts again would find it taken."""
    while True:
        port = 10_000 + secrets.randbelow(22_768)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
