"""Heartbeats of the ranks: one that is gone, stopped or silent is named in the log.

    thread of rank r ──a line every `BEAT_S`──► thread of rank 0       rank 0 has a connection with every other rank
                     ◄──a line every `BEAT_S`──

    seen by rank 0 of another rank, and by another rank of rank 0              then
    gone       its process ended without a farewell, or with an error          all ranks end, after `GRACE_S`
    stopped    silent for `timeout_s`, its process is held (SIGSTOP)           all ranks end
    silent     silent for `timeout_s`                                          a warning; all ranks end at `patience_s`

A stopped process has no thread that runs, so its silence is the sign. A call that keeps Python's lock is silent, too,
and may be slow work: only the kernel of its machine can distinguish the two. On another machine both end the run at
`patience_s`, the deadline of a collective. A machine that is gone acknowledges nothing: its connection ends after
`timeout_s`. A rank that waits in a collective for ever beats on; the collective's deadline ends it.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from penstock.common import own_host, process_has_ended, process_identity
from penstock.trainer.ranks.distributed import Ranks

BEAT_S = 1.0
GRACE_S = 20.0
"""For ranks whose peer is gone: their collectives fail, and they end with an error of their own in less."""
FAREWELL_S = 6.0
"""A rank that ends with an error listens for so long: the loss of another one may be the cause."""
START_S = 60.0
"""For all ranks to connect."""
HELLO_BYTES = 4096
logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Peer:
    """The other end of a connection."""

    rank: int
    host: str
    identity: str
    """Identity of the rank's process, as `process_identity` writes it."""
    link: socket.socket
    heard_at: float
    unread: bytes = b""
    is_silent: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"

    @property
    def pid(self) -> int:
        return int(self.identity.split(":")[-2])

    @property
    def is_stopped(self) -> bool:
        """False for a process of another machine."""
        if self.identity.split(":")[:-2] != process_identity().split(":")[:-2]:
            return False
        with contextlib.suppress(OSError, IndexError):
            return Path(f"/proc/{self.pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "Tt"
        return False


class Heartbeat:
    """The thread of one rank. `start` is a collective; `leave` reports how the rank ends, `close` ends the thread."""

    def __init__(self, rank: int, peers: list[Peer], timeout_s: float, patience_s: float) -> None:
        self._rank, self._peers = rank, peers
        self._finished_peers: list[Peer] = []
        """Ranks that end. They are notified of losses and of this rank's end as well: they listen for `FAREWELL_S`."""
        self._timeout_s, self._patience_s = timeout_s, patience_s
        self._sending = threading.Lock()
        self._over = threading.Event()
        self._has_left = self._failed = False
        self._ends: tuple[float, str] | None = None
        """When this process is killed, and why."""
        for peer in peers:
            peer.link.setblocking(False)
            with contextlib.suppress(AttributeError, OSError):  # Linux alone
                peer.link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    @classmethod
    def start(cls, ranks: Ranks, timeout_s: float, patience_s: float) -> Heartbeat | None:
        """Returns None without other ranks, or if `timeout_s` is 0. Raises `OSError` and `ValueError` if a
        rank does not connect within `START_S`."""
        if ranks.world == 1 or not timeout_s:
            return None
        here = int(os.environ.get("LOCAL_WORLD_SIZE") or ranks.world) == ranks.world
        host = "127.0.0.1" if here else own_host()
        me = {"rank": ranks.rank, "host": socket.gethostname(), "identity": process_identity()}
        if not ranks.is_rank0:
            first = ranks.from_rank0(None)
            host, port = first.pop("address")
            try:
                link = socket.create_connection((host, port), START_S)
            except OSError as error:
                raise ConnectionError(
                    f"the heartbeat of rank 0 is not reached at {host}, port {port}: {error}"
                ) from error
            link.sendall(_line({"secret": first.pop("secret"), **me}))
            return cls(ranks.rank, [Peer(**first, link=link, heard_at=time.monotonic())], timeout_s, patience_s)
        # An announced name may mean loopback here, as Debian's 127.0.1.1 does: only strangers without the secret gain.
        bound = host if here else "::" if ":" in host else "0.0.0.0"  # noqa: S104
        family = socket.AF_INET6 if ":" in bound else socket.AF_INET
        with socket.create_server((bound, 0), family=family, backlog=ranks.world) as server:
            secret = secrets.token_hex(16)
            ranks.from_rank0({"address": [host, server.getsockname()[1]], "secret": secret, **me})
            return cls(0, _accept(server, secret, ranks.world - 1), timeout_s, patience_s)

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Leave as the exit of a context does: the rank ends with this error, or in order. The first call counts."""
        if self._has_left:
            return
        self._has_left, self._failed = True, isinstance(error, Exception)
        self._tell({"left": f"{type(error).__name__}: {error}"[:2000] if self._failed else ""})

    def close(self) -> None:
        """Ends the thread. Blocks for `FAREWELL_S` if this rank failed and others are there."""
        self.leave(None, None, None)
        if self._failed:
            self._over.wait(FAREWELL_S)
        self._over.set()
        self._thread.join()
        for peer in [*self._peers, *self._finished_peers]:
            peer.link.close()

    def _run(self) -> None:
        before = time.monotonic()
        while not self._over.wait(BEAT_S):
            now = time.monotonic()
            if now - before > 3 * BEAT_S:  # this process stood still, perhaps the machine: no silence was heard
                for peer in self._peers:
                    peer.heard_at = now
            before = now
            for peer in list(self._peers):
                self._hear(peer, now)
                if peer in self._peers:
                    self._judge(peer, now)
            self._tell({})
            if self._ends is not None and now >= self._ends[0]:
                _kill_itself(self._ends[1])
            if self._has_left and not self._peers:
                return self._over.set()

    def _hear(self, peer: Peer, now: float) -> None:
        is_over = False
        try:
            while not is_over:
                received = peer.link.recv(4096)
                is_over = not received
                peer.unread += received
                peer.heard_at = now
        except BlockingIOError:
            pass
        except OSError:
            is_over = True
        *lines, peer.unread = peer.unread.split(b"\n")
        for line in map(json.loads, lines):
            if "end" in line:
                logger.error("all ranks are ended: %s", line["end"])
                self._end(line["end"], float(line["grace_s"]))
            elif "left" in line:
                self._peers.remove(peer)
                self._finished_peers.append(peer)
                if line["left"]:
                    self._lose(peer, f"it ended with {line['left']}", GRACE_S)
        if is_over and peer in self._peers:
            self._peers.remove(peer)
            if self._ends is None or self._rank == 0:
                self._lose(peer, "it has ended without a report, or its machine has", GRACE_S)

    def _judge(self, peer: Peer, now: float) -> None:
        silent_s = now - peer.heard_at
        if silent_s < self._timeout_s:
            peer.is_silent = False
        elif process_has_ended(peer.identity):  # a process that it forked keeps the connection open
            self._peers.remove(peer)
            self._lose(peer, "its process has ended without a report", GRACE_S)
        elif peer.is_stopped:
            self._peers.remove(peer)
            self._lose(peer, f"its process has been stopped (SIGSTOP or a debugger) for {silent_s:.0f} s")
            with contextlib.suppress(OSError):
                os.kill(peer.pid, signal.SIGKILL)  # a stopped process hears nothing else
        elif silent_s >= self._patience_s:
            self._peers.remove(peer)
            self._lose(peer, f"nothing was heard of it for {silent_s:.0f} s")
        elif not peer.is_silent:
            peer.is_silent = True
            logger.warning(
                "%s: nothing was heard of it for %.0f s. A call keeps its Python lock, or its machine is away; all "
                "ranks end if it is silent for %.0f s (trainer.collective_timeout_s)",
                peer,
                silent_s,
                self._patience_s,
            )

    def _lose(self, peer: Peer, what: str, grace_s: float = 0.0) -> None:
        text = f"{peer}: {what}"
        logger.error("all ranks are ended: %s", text)
        if self._rank == 0:
            self._tell({"end": text, "grace_s": grace_s})
        self._end(text, grace_s + 2 * BEAT_S)  # the others hear of it before this process is gone

    def _end(self, text: str, grace_s: float) -> None:
        at = time.monotonic() + grace_s
        if self._ends is None or at < self._ends[0]:
            self._ends = at, text

    def _tell(self, content: Mapping[str, Any]) -> None:
        """A rank that takes no lines any more, 64 KiB of them, is silent as well."""
        for peer in [*self._peers, *self._finished_peers]:
            with self._sending, contextlib.suppress(OSError):
                peer.link.send(_line(content))


def _accept(server: socket.socket, secret: str, count: int) -> list[Peer]:
    """Rejects connections of strangers. Raises `TimeoutError`, which names the ranks that are missing."""
    peers: list[Peer] = []
    deadline = time.monotonic() + START_S
    while len(peers) < count:
        server.settimeout(max(0.0, deadline - time.monotonic()) or 1e-3)
        try:
            link, _ = server.accept()
        except TimeoutError as error:
            missing = sorted(set(range(1, count + 1)) - {peer.rank for peer in peers})
            raise TimeoutError(f"no heartbeat of the ranks {missing} within {START_S:.0f} s") from error
        until = min(deadline, time.monotonic() + 10.0)  # for the first line of one connection
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            received = b""
            while b"\n" not in received and len(received) < HELLO_BYTES:
                link.settimeout(max(0.0, until - time.monotonic()) or 1e-3)
                received += (data := link.recv(HELLO_BYTES))
                if not data or time.monotonic() > until:
                    break
            first, _, rest = received.partition(b"\n")
            hello = json.loads(first)
            if hmac.compare_digest(str(hello.pop("secret", "")).encode(), secret.encode()):
                peers.append(Peer(**hello, link=link, heard_at=time.monotonic(), unread=rest))
                continue
        link.close()
    return peers


def _kill_itself(text: str) -> None:
    """torchrun's report of the failed ranks has the text."""
    message = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with contextlib.suppress(OSError):
            Path(file).write_text(json.dumps({"message": message}))
    os.kill(os.getpid(), signal.SIGKILL)


def _line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content).encode() + b"\n"
