"""The connection to a child process: callers that wait fail when the child ends."""

from __future__ import annotations

import asyncio
import socket

import pytest

from penstock.rollout_server import EngineError
from penstock.rollout_server.engines.child_link import Link


@pytest.mark.parametrize("last", [b"", b'{"event":"reply","call":0,"sco'], ids=["between two messages", "in a message"])
async def test_a_child_that_is_killed_fails_all_that_wait_with_the_cause(last: bytes) -> None:
    async def reap() -> None:
        """Nothing is to be reaped: the child is this test."""

    link = Link(reap, lambda: "the child was killed", "the child")
    ours, theirs = socket.socketpair()
    await link.open(ours)
    _, answer = link.stream()
    waiting = asyncio.create_task(link.call("load", timeout_s=600.0))
    await asyncio.sleep(0)
    assert b"load" in theirs.recv(1 << 12)  # a connection that is closed with unread bytes is reset
    theirs.sendall(last)
    theirs.close()
    async with asyncio.timeout(60.0):
        with pytest.raises(EngineError, match="the child was killed"):
            await waiting
        with pytest.raises(EngineError, match="the child was killed"):
            await link.ready
        assert isinstance(await answer.get(), EngineError)
    assert not link.is_open
    link.close_writing()
