"""Ports for servers of tests."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port on loopback that nothing uses at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
