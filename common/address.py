"""The address under which other machines reach this one, and the network interface that has it: one rule for all parts.

    1. PENSTOCK_HOST                     as the launcher or a person says: Slurm's NodeAddr, a pod's address
    2. this machine's name               if it resolves to an address of a network here
    3. the address towards the queue     of the interface by which packets to PENSTOCK_QUEUE's host leave
    4. this machine's name               if there is nothing else

Debian gives a machine's name to 127.0.1.1: then the third says what others can use.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

HOST_VARIABLE = "PENSTOCK_HOST"
"""Address or name of this machine for others."""
QUEUE_VARIABLE = "PENSTOCK_QUEUE"


def own_host() -> str:
    """Returns this machine's address by the rule above."""
    return os.environ.get(HOST_VARIABLE) or _find_own_address(
        socket.gethostname(), os.environ.get(QUEUE_VARIABLE) or ""
    )


def reachable_host(bound: str) -> str:
    """Returns the address under which others reach a listener on `bound`: `own_host` for "all interfaces"."""
    return own_host() if bound in ("0.0.0.0", "::") else bound  # noqa: S104 - what settings say, not a binding


def listening_host(host: str) -> str:
    """Returns an address of this machine to listen on if `host` is announced to others: `host`, or another one if that
    name stands for loopback here or for an address that this machine does not have."""
    if is_loopback(host) or _can_listen(host):
        return host
    queue = urlsplit(os.environ.get(QUEUE_VARIABLE) or "").hostname
    no_machine = "192.0.2.1"  # of a range for documentation: the way there is the default one
    return _towards(queue) or _towards(no_machine) or host


def address_towards(host: str, port: int) -> str:
    """Returns this machine's address on the way to `host`; sends no packet. Raises `OSError` if there is no route."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def is_loopback(host: str | None) -> bool:
    """An address or name that only this machine reaches. None and an empty one count: they are what is listened on
    unless a setting says otherwise."""
    if not host or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def interface_of(host: str) -> str | None:
    """The network interface of this machine that has the address `host`, or one of that name; None where none has."""
    with contextlib.suppress(OSError):
        for *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            for _, name in socket.if_nameindex():
                # First IPv4 address of an interface, and all of its IPv6 addresses.
                addresses = set()
                with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                    siocgifaddr, request = 0x8915, struct.pack("256s", name.encode()[:15])
                    addresses.add(socket.inet_ntoa(fcntl.ioctl(probe.fileno(), siocgifaddr, request)[20:24]))
                with contextlib.suppress(OSError):
                    rows = (line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines())
                    addresses |= {str(ipaddress.IPv6Address(bytes.fromhex(row[0]))) for row in rows if row[5] == name}
                if str(address[0]).partition("%")[0] in addresses:
                    return name
    return None


def interfaces_for(host: str) -> dict[str, str]:
    """Variables by which gloo and NCCL take that interface; without those that the environment has already."""
    name, variables = interface_of(host), ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {one: name for one in variables if name and not os.environ.get(one)}


@lru_cache
def _find_own_address(name: str, queue: str) -> str:
    if not is_loopback(_resolved(name)):
        return name
    return _towards(urlsplit(queue).hostname) or name


def _resolved(name: str) -> str | None:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return None


def _can_listen(host: str) -> bool:
    """Returns True if the name stands for an address of this machine that others reach."""
    with contextlib.suppress(OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        if is_loopback(str(address[0])):
            return False
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False


def _towards(host: str | None) -> str | None:
    """`address_towards`; None if that is loopback, or no way."""
    with contextlib.suppress(OSError):
        if host is None or is_loopback(host):
            return None
        own = address_towards(host, 9)
        return None if is_loopback(own) else own
    return None
