"""Whether the addresses that the run listens on are of this machine, and their ports free."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator, Sequence

from penstock.deploy.config import RunConfig
from penstock.deploy.preflight.check import Check, warning

EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - what a recipe says, not a binding
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def check_ports(config: RunConfig) -> Iterator[Check]:
    rollout, page = config.rollout, config.dashboard
    servers = rollout.servers + rollout.evaluation_server
    if rollout.servers:
        ports = range(rollout.port, rollout.port + servers) if rollout.port else [0]
        yield _listened("rollout", rollout.host, ports, "host", "port")
    if rollout.weight_transport in ("http", "collective"):
        yield _listened("rollout", rollout.weights_host, [rollout.weights_port], "weights_host", "weights_port")
    if page.enabled:
        yield _listened("dashboard", page.host, [page.port], "host", "port")


def _listened(section: str, host: str, ports: Sequence[int], host_key: str, port_key: str) -> Check:
    name = f"{section}.{port_key}"
    for port in ports:
        try:
            _bind(host, port)
        except socket.gaierror as error:
            mend = f"set {section}.{host_key} to an address or name of this machine"
            return Check(f"{section}.{host_key}", False, f"{host}: {error.strerror}", mend)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                mend = f"set {section}.{host_key} to an address of this machine, or to 0.0.0.0 for all of them"
                return Check(f"{section}.{host_key}", False, f"{host} is not of this machine", mend)
            mend = f"stop what listens there, or set {name}=0 to take free ports"
            return Check(name, False, f"{host}:{port}: {error.strerror}", mend)
    return Check(
        name, True, f"{ports[0]} and up are free" if ports[0] else f"free ones of {host} are taken at the start"
    )


def _bind(host: str, port: int) -> None:
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def check_advertised(config: RunConfig) -> Iterator[Check]:
    """What other machines are told of this one, and whether they could make anything of it."""
    rollout = config.rollout
    if rollout.host in EVERYWHERE and rollout.servers:
        yield _own_name()
    if rollout.servers or not config.transfer_queue.url:
        return
    if rollout.weight_transport in ("http", "collective") and rollout.weights_host in LOOPBACK:
        yield Check(
            "rollout.weights_host",
            False,
            f"rollout.servers is 0, so servers are elsewhere, and weights are served on {rollout.weights_host}",
            "set rollout.weights_host to an address that they reach, or to 0.0.0.0",
        )
    if rollout.weight_transport == "shm":
        yield warning(
            "rollout.weight_transport",
            "rollout.servers is 0, and weights go through shared memory, which servers elsewhere cannot read",
            "set rollout.weight_transport=http, or disk on a disk that all machines share",
        )


def _own_name() -> Check:
    name = socket.gethostname()
    try:
        found = socket.gethostbyname(name)
    except OSError as error:
        mend = "give the machine a name that others resolve, or set rollout.host to its address"
        return Check("rollout.host", False, f"this machine is advertised as {name}: {error}", mend)
    if found.startswith("127."):
        mend = f"let {name} stand for the machine's address in DNS or /etc/hosts, or set rollout.host to that address"
        return warning("rollout.host", f"this machine is advertised as {name}, which is {found} here", mend)
    return Check("rollout.host", True, f"advertised as {name}, {found}")
