"""A rank that is gone, stopped or silent is named, and all ranks end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from trainer_support import ENVIRONMENT, HERE

from penstock.common import process_identity
from penstock.trainer.ranks.heartbeat import Heartbeat, Peer, _accept

pytestmark = pytest.mark.torch
TIMEOUT_S = 8.0
WITHIN_S = 60.0
"""Of the fault, all ranks have ended."""
ENDING = {
    "stopped": (2, "its process has been stopped (SIGSTOP or a debugger)"),
    "first_stopped": (0, "its process has been stopped (SIGSTOP or a debugger)"),
    "killed": (2, "has ended without a report"),
    "first_killed": (0, "has ended without a report"),
    "failed": (2, "it ended with ValueError: an error of one rank"),
}
"""Case → the rank that is named, and what the log says of it."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each case."""
    folder = tmp_path_factory.mktemp("ranks")
    program = HERE / "beating_ranks.py"
    command = [sys.executable, str(program), str(folder), str(TIMEOUT_S), *ENDING, "locked"]
    with subprocess.Popen(command, env=ENVIRONMENT, start_new_session=True) as process:
        try:
            assert process.wait(300) == 0
        finally:
            os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
    return folder


def ended(folder: Path) -> dict[int, tuple[int, float]]:
    """By rank: exit status, seconds after the fault."""
    return {int(rank): tuple(how) for rank, how in json.loads((folder / "ended.json").read_text()).items()}


def named(folder: Path, rank: int) -> str:
    """As messages name the rank of the fault."""
    return f"rank {rank} (host {socket.gethostname()}, pid {json.loads((folder / 'fault.json').read_text())['pid']})"


@pytest.mark.parametrize("case", ENDING)
def test_lost_rank_is_named_and_all_ranks_end(runs: Path, case: str) -> None:
    rank, why = ENDING[case]
    log, statuses = (runs / case / "log").read_text(), ended(runs / case)
    causes = [line for line in log.splitlines() if "all ranks are ended" in line]
    assert any(named(runs / case, rank) in line and why in line for line in causes), log
    assert len(statuses) == 4
    assert all(status for status, _ in statuses.values()), "none ended as if all were well"
    assert max(after_s for _, after_s in statuses.values()) < WITHIN_S


def test_call_that_keeps_pythons_lock_is_named_and_not_ended(runs: Path) -> None:
    log = (runs / "locked" / "log").read_text()
    assert {status for status, _ in ended(runs / "locked").values()} == {0}, log
    silent = f"{named(runs / 'locked', 2)}: nothing was heard of it"
    (warning,) = [line for line in log.splitlines() if silent in line]  # a busy machine may have others stand still too
    assert "trainer.collective_timeout_s" in warning


def peer_of(link: socket.socket) -> Peer:
    """A rank of another machine."""
    return Peer(1, "far", "boot:7:123:456", link, time.monotonic())


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set in the place of this process's end; beats are quick."""
    event = threading.Event()
    monkeypatch.setattr("penstock.trainer.ranks.heartbeat._kill_itself", lambda text: event.set())
    monkeypatch.setattr("penstock.trainer.ranks.heartbeat.BEAT_S", 0.05)
    return event


def test_silent_rank_of_another_machine_ends_all_after_patience(
    killed: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    mine, _theirs = socket.socketpair()
    heartbeat = Heartbeat(0, [peer_of(mine)], timeout_s=0.2, patience_s=0.5)
    assert killed.wait(200)
    heartbeat.close()
    assert re.search(r"rank 1 \(host far, pid 123\): nothing was heard of it", caplog.text)
    assert "all ranks are ended" in caplog.text


def test_rank_that_left_in_order_is_not_missed(killed: threading.Event) -> None:
    mine, theirs = socket.socketpair()
    heartbeats = [Heartbeat(rank, [peer_of(link)], 60.0, 60.0) for rank, link in enumerate((mine, theirs))]
    heartbeats[1].close()
    heartbeats[0].leave(None, None, None)
    assert heartbeats[0]._over.wait(30), "the last one has nobody to wait for"
    heartbeats[0].close()
    assert not killed.is_set()


def test_ranks_that_end_with_errors_one_after_the_other_hear_of_each_other(
    killed: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    mine, theirs = socket.socketpair()
    heartbeats = [Heartbeat(rank, [peer_of(link)], 60.0, 60.0) for rank, link in enumerate((mine, theirs))]
    heartbeats[1].leave(ValueError, ValueError("the cause"), None)
    heartbeats[0]._thread.join(0.5)  # some beats: rank 0 hears of it before it ends itself
    heartbeats[0].leave(RuntimeError, RuntimeError("connection reset by peer"), None)
    assert heartbeats[1]._over.wait(30)
    for heartbeat in heartbeats:
        heartbeat.close()
    assert "it ended with ValueError: the cause" in caplog.text
    assert "it ended with RuntimeError: connection reset by peer" in caplog.text
    assert "without a report" not in caplog.text
    assert not killed.is_set()


def test_stranger_without_the_secret_is_sent_away() -> None:
    me = {"rank": 1, "host": "here", "identity": process_identity()}
    with socket.create_server(("127.0.0.1", 0)) as server:
        links = [socket.create_connection(server.getsockname()) for _ in range(3)]
        for link, hello in zip(links, ({**me, "secret": "guess"}, [], {**me, "secret": "s"}), strict=True):
            link.sendall(json.dumps(hello).encode() + b"\n{}\n")
        (peer,) = _accept(server, "s", 1)
        assert str(peer) == f"rank 1 (host here, pid {os.getpid()})"
        assert peer.unread == b"{}\n"
        assert links[0].recv(1) == b""
        for link in (*links, peer.link):
            link.close()


def test_stranger_that_sends_byte_by_byte_does_not_move_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.trainer.ranks.heartbeat.START_S", 1.0)
    over = threading.Event()

    def drip(address: tuple[str, int]) -> None:
        with socket.create_connection(address) as link:
            for _ in range(300):
                if over.wait(0.2):
                    return
                with contextlib.suppress(OSError):
                    link.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as server:
        stranger = threading.Thread(target=drip, args=(server.getsockname(),))
        stranger.start()
        with pytest.raises(TimeoutError, match=r"ranks \[1, 2\]"):
            _accept(server, "s", 2)
        assert stranger.is_alive(), "it would have gone on for a minute"
        over.set()
        stranger.join()


def test_time_in_which_this_process_stood_still_is_nobodys_silence(
    monkeypatch: pytest.MonkeyPatch, killed: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [0.0]
    monkeypatch.setattr("penstock.trainer.ranks.heartbeat.time", SimpleNamespace(monotonic=lambda: clock[0]))
    mine, theirs = socket.socketpair()
    heartbeat = Heartbeat(0, [replace(peer_of(mine), heard_at=0.0)], timeout_s=60.0, patience_s=60.0)
    with theirs.makefile("rb") as beats:
        beats.readline()
        clock[0] = 100.0
        for _ in range(5):
            assert beats.readline() == b"{}\n"
    heartbeat.close()
    assert not caplog.text
    assert not killed.is_set()


def test_one_rank_alone_has_no_heartbeat(ranks: Any) -> None:
    assert Heartbeat.start(ranks, 30.0, 600.0) is None
