"""The keeper of a managed box by itself: a driver that the test plays, and connections that break."""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.sandbox.inside import driver, keeper, relay

GAP_S = 0.5
"""In which the keeper handles what it was sent. Were it too short, a test would prove less, and pass."""


class Ends:
    """The driver's end of a keeper, and connections to it as a relay makes them."""

    def __init__(self) -> None:
        self.name = f"keeper-{secrets.token_hex(8)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind("\0" + self.name)
        listener.listen(4)
        ours, self.driver = socket.socketpair()
        self.driver.settimeout(20)
        self._thread = threading.Thread(target=keeper.Keeper(listener, ours).serve, daemon=True)
        self._thread.start()

    def client(self) -> Client:
        return Client(relay.connect(self.name))

    def asked(self) -> int:
        """The number of the request that reaches the driver."""
        (size,) = driver.LENGTH.unpack(self.driver.recv(driver.LENGTH.size, socket.MSG_WAITALL))
        return int(json.loads(self.driver.recv(size, socket.MSG_WAITALL))["id"])

    def answer(self, frame: dict[str, Any]) -> None:
        body = json.dumps(frame).encode()
        self.driver.sendall(driver.LENGTH.pack(len(body)) + body)

    def close(self) -> None:
        self.driver.close()
        self._thread.join(20)


class Client:
    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(20)
        self._connection = connection
        self._lines = connection.makefile("rb")

    def ask(self, number: int, have: int = 0) -> None:
        self._connection.sendall(json.dumps({"do": "run", "id": number, "have": have}).encode() + b"\n")

    def line(self) -> dict[str, Any]:
        return json.loads(self._lines.readline())

    def break_off(self) -> None:
        self._lines.close()
        self._connection.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def test_what_comes_before_the_request_comes_again_comes_once(ends: Ends) -> None:
    """The program goes on while a new connection is there and the request is not yet sent again over it."""
    first = ends.client()
    first.ask(1)
    assert ends.asked() == 1
    ends.answer({"id": 1, "out": "stdout", "data": "started"})
    assert first.line()["data"] == "started"
    first.break_off()
    second = ends.client()
    time.sleep(GAP_S)
    ends.answer({"id": 1, "out": "stdout", "data": "ended"})
    ends.answer({"id": 1, "exit": 0})
    time.sleep(GAP_S)
    second.ask(1, have=1)
    assert [second.line(), second.line()] == [{"id": 1, "out": "stdout", "data": "ended"}, {"id": 1, "exit": 0}]
    second.ask(2)
    assert ends.asked() == 2
    ends.answer({"id": 2, "exit": 0})
    assert second.line() == {"id": 2, "exit": 0}


def test_who_asks_again_hears_the_rest_as_it_comes(ends: Ends) -> None:
    first = ends.client()
    first.ask(1)
    assert ends.asked() == 1
    first.break_off()
    second = ends.client()
    second.ask(1)
    time.sleep(GAP_S)
    ends.answer({"id": 1, "out": "stdout", "data": "late"})
    ends.answer({"id": 1, "exit": 0})
    assert [second.line(), second.line()] == [{"id": 1, "out": "stdout", "data": "late"}, {"id": 1, "exit": 0}]


def test_the_greeting_waits_for_the_first_connection(ends: Ends) -> None:
    ends.answer({"ready": True})
    assert ends.client().line() == {"ready": True}
