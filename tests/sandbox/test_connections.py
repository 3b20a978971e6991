"""Connections of a box as sockets; frames that no driver sends, where a box can write them itself, end its run."""

from __future__ import annotations

import asyncio
import base64
import socket
from typing import Any

import pytest

from penstock.sandbox import SandboxError
from penstock.sandbox.connections import BoxConnections
from penstock.sandbox.inside.forward import WINDOW_BYTES

PIECE = base64.b64encode(b"x" * (WINDOW_BYTES // 2)).decode()


class Taken:
    """Takes connections and reads nothing of them."""

    def __init__(self) -> None:
        self.accepted: list[socket.socket] = []
        self.sent: list[dict[str, Any]] = []
        self.connections = BoxConnections(self.send, self.accepted.append)

    async def send(self, frame: dict[str, Any]) -> None:
        self.sent.append(frame)

    async def close(self) -> None:
        await self.connections.close()
        for one in self.accepted:
            one.close()


async def test_an_answer_that_comes_before_the_end_of_its_request_is_not_lost() -> None:
    """A server that refuses a request by its head closes while the body is still on its way."""
    taken = Taken()
    try:
        taken.connections.take({"conn": 1, "data": base64.b64encode(b"head").decode()})
        (served,) = taken.accepted
        async with asyncio.timeout(60):
            assert await asyncio.get_running_loop().sock_recv(served, 100) == b"head"
            await asyncio.get_running_loop().sock_sendall(served, b"refused")
            served.close()
            taken.connections.take({"conn": 1, "data": base64.b64encode(b"body").decode()})
            while not any(frame.get("gone") for frame in taken.sent):
                await asyncio.sleep(0.01)
        answer = b"".join(base64.b64decode(frame.get("data", "")) for frame in taken.sent)
        assert answer == b"refused"
    finally:
        await taken.close()


FORGED: dict[str, list[Any]] = {
    "more than a window": [{"conn": 1, "data": PIECE}, {"conn": 1, "data": PIECE}, {"conn": 1, "data": "eA=="}],
    "no number": [{"conn": "one", "data": ""}],
    "an endless number": [{"conn": float("inf"), "data": ""}],
    "no base64": [{"conn": 1, "data": "?"}],
    "no text": [{"conn": 1, "data": {}}],
    "no count": [{"conn": 1, "data": ""}, {"conn": 1, "ack": []}],
    "two ends": [{"conn": 1, "end": True}, {"conn": 1, "end": True}],
    "bytes after the end": [{"conn": 1, "end": True}, {"conn": 1, "data": "eA=="}],
}


@pytest.mark.parametrize("name", FORGED)
async def test_attack_forged_frames_are_refused(name: str) -> None:
    *before, last = FORGED[name]
    taken = Taken()
    try:
        for frame in before:
            taken.connections.take(frame)
        with pytest.raises(SandboxError, match="the box broke its protocol"):
            taken.connections.take(last)
    finally:
        await taken.close()


async def test_attack_connections_are_counted_while_they_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.sandbox.connections.MAX_OPEN", 16)
    taken = Taken()
    try:
        for number in range(1, 100):
            taken.connections.take({"conn": number, "data": ""})
            taken.connections.take({"conn": number, "gone": True})
            taken.accepted.pop().close()
    finally:
        await taken.close()


async def test_attack_too_many_open_connections_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.sandbox.connections.MAX_OPEN", 16)
    taken = Taken()
    try:
        for number in range(1, 17):
            taken.connections.take({"conn": number, "data": ""})
        with pytest.raises(SandboxError, match="16 open connections"):
            taken.connections.take({"conn": 17, "data": ""})
    finally:
        await taken.close()
