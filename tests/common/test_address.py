"""Under which address this machine is announced, and by which interface it is reached."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from penstock.common import interfaces_for, is_loopback, own_host, reachable_host, url_host
from penstock.common.address import _find_own_address, interface_of, listening_host

NAME = socket.gethostname()


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("PENSTOCK_HOST", "PENSTOCK_QUEUE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    _find_own_address.cache_clear()
    yield
    _find_own_address.cache_clear()


def resolves_to(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda name: address)


def names_stand_for(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    def found(name: str, port: int, **options: int) -> list[tuple[object, ...]]:
        if not address:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (address, port))]

    monkeypatch.setattr(socket, "getaddrinfo", found)


def test_what_the_launcher_says_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    resolves_to(monkeypatch, "10.0.0.7")
    monkeypatch.setenv("PENSTOCK_HOST", "node-7.cluster")
    assert own_host() == "node-7.cluster"
    assert [reachable_host(bound) for bound in ("0.0.0.0", "::", "10.1.1.1", "127.0.0.1")] == [
        "node-7.cluster",
        "node-7.cluster",
        "10.1.1.1",
        "127.0.0.1",
    ]
    assert url_host("0.0.0.0") == "node-7.cluster"


def test_a_name_that_stands_for_a_network_address_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    resolves_to(monkeypatch, "10.0.0.7")
    monkeypatch.setenv("PENSTOCK_QUEUE", "redis://192.0.2.1:6379")
    assert own_host() == NAME


def test_else_the_address_on_the_way_to_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    resolves_to(monkeypatch, "127.0.1.1")
    assert own_host() == NAME, "no queue is named"
    monkeypatch.setenv("PENSTOCK_QUEUE", "redis://127.0.0.1:6379")
    assert own_host() == NAME, "the queue is on this machine"
    monkeypatch.setattr("penstock.common.address._towards", lambda host: f"towards {host}")
    monkeypatch.setenv("PENSTOCK_QUEUE", "redis://user:word@192.0.2.1:6379")
    assert own_host() == "towards 192.0.2.1"


@pytest.mark.parametrize("address", ["127.0.1.1", "192.0.2.77", ""])
def test_an_address_that_others_do_not_reach_is_not_listened_on(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's own name, an address of a gateway in front of this machine, a name without an address."""
    names_stand_for(monkeypatch, address)
    monkeypatch.setattr("penstock.common.address._towards", lambda host: host and f"towards {host}")
    assert listening_host("node-0") == "towards 192.0.2.1", "no queue is named: the default way"
    monkeypatch.setenv("PENSTOCK_QUEUE", "redis://user:word@10.0.0.1:6379")
    assert listening_host("node-0") == "towards 10.0.0.1"
    monkeypatch.setattr("penstock.common.address._towards", lambda host: None)
    assert listening_host("node-0") == "node-0", "there is no network"


def test_an_address_of_this_machine_is_listened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.common.address._towards", lambda host: f"towards {host}")
    assert [listening_host(host) for host in ("127.0.0.1", "::1", "localhost")] == ["127.0.0.1", "::1", "localhost"]
    names_stand_for(monkeypatch, "10.0.0.7")
    monkeypatch.setattr(socket.socket, "bind", lambda probe, address: None)
    assert listening_host("node-7") == "node-7"


def test_addresses_of_loopback_are_known() -> None:
    assert all(is_loopback(host) for host in (None, "", "localhost", "127.0.0.1", "127.0.1.1", "::1"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "10.0.0.1", "node-7"))


def test_gloo_and_nccl_take_the_interface_of_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None
    assert interfaces_for("192.0.2.1") == {}
    assert interfaces_for("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert interfaces_for("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo"}
