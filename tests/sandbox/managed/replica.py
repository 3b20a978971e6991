"""Boxes behind the replicas of providers' APIs: bubblewrap's, in which commands run as they would in a provider's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.responses import Response
from tests.until import until

WALLS = ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--tmpfs", "/sys"]
ROOT_OF_ITS_OWN = ["--unshare-user", "--uid", "0", "--gid", "0"]
"""For an ordinary user: one user namespace, which owns the box's others, so that commands can enter them."""
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}

KEEP_OPEN = "echo ready; exec sleep infinity"


@dataclass
class ReplicaBox:
    """One bubblewrap box with a process that does nothing."""

    labels: dict[str, str]
    image: str = ""
    asked: dict[str, object] = field(default_factory=dict)
    """The request that made it."""
    box_id: str = field(default_factory=lambda: secrets.token_hex(8))
    started: float = field(default_factory=time.time)
    walls: tuple[str, ...] = ()
    """Further options of bubblewrap's."""

    def __post_init__(self) -> None:
        read, write = os.pipe()
        walls = [*WALLS, *self.walls, *(() if os.getuid() == 0 else ROOT_OF_ITS_OWN)]
        self._process = subprocess.Popen(
            ["bwrap", *walls, "--unshare-pid", "--die-with-parent", "--info-fd", str(write), "sh", "-c", KEEP_OPEN],
            pass_fds=[write],
            stdout=subprocess.PIPE,
            env=ENVIRONMENT,
        )
        os.close(write)
        with os.fdopen(read) as info:
            self._pid = json.loads(info.read())["child-pid"]
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"  # before that, its root is not there yet

    async def run(self, argv: Sequence[str], *, stdin: bool = True) -> asyncio.subprocess.Process:
        """A program in the box, its output in pipes."""
        enter = ["nsenter", "-t", str(self._pid), "-m", "-p", "-r", "-w"]
        if os.getuid() != 0:
            enter += ["-U", "--preserve-credentials"]
        return await asyncio.create_subprocess_exec(
            *enter,
            *argv,
            stdin=asyncio.subprocess.PIPE if stdin else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=ENVIRONMENT,
            limit=1 << 20,
        )

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@dataclass
class Faults:
    """What a replica does instead of answering: the next ones first, one per request that `applies` to."""

    queue: list[str] = field(default_factory=list)
    """``429``, ``500``, ``silence`` (never answers) or ``lost`` (does it, and never answers)."""
    retry_after_s: float = 0.0
    seen: list[str] = field(default_factory=list)
    """Every request for a box, in order: what was done with it."""

    def next(self) -> str:
        fault = self.queue.pop(0) if self.queue else "ok"
        self.seen.append(fault)
        return fault


class Replica:
    """Common to all providers: boxes by id, faults, listing in pages, broken connections."""

    walls: tuple[str, ...] = ()
    """Of its boxes, beside the usual ones."""
    asks_again = 1
    """How often the provider's SDK sends a request that is answered with 5xx, before it says so."""

    def __init__(self) -> None:
        self.boxes: dict[str, ReplicaBox] = {}
        self.ended: list[ReplicaBox] = []
        self.app: Any = None
        """ASGI, where the provider's API is HTTP."""
        self.create_faults = Faults()
        self.end_faults = Faults()
        self.hung_up = asyncio.Event()
        """Set when the connections of the running programs break."""

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serves `app` on a socket of this machine and yields its URL."""
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(self.app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await until(lambda: server.started)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task
            listener.close()

    async def refused(self, fault: str, error: Callable[[int, str, dict[str, str]], Response]) -> Response | None:
        """What a request for a box is answered instead, in the provider's own form; None: nothing is wrong yet."""
        if fault == "429":
            return error(429, "too many requests", {"Retry-After": str(int(self.create_faults.retry_after_s))})
        if fault == "500":
            return error(500, "it broke", {})
        if fault == "silence":
            await never()
        return None

    def make(self, labels: dict[str, str], image: str, asked: dict[str, object], box_id: str = "") -> ReplicaBox:
        box = ReplicaBox(labels, image, asked, walls=self.walls)
        box.box_id = box_id or box.box_id
        self.boxes[box.box_id] = box
        return box

    def find(self, labels: dict[str, str]) -> list[ReplicaBox]:
        return [box for box in self.boxes.values() if labels.items() <= box.labels.items()]

    def page(self, labels: dict[str, str], start: str) -> tuple[list[ReplicaBox], str]:
        """Two boxes from `start` on, oldest first, and the start of the next page: a client must ask on."""
        match = sorted(self.find(labels), key=lambda box: box.started)
        first = int(start or 0)
        return match[first : first + 2], str(first + 2) if match[first + 2 :] else ""

    def end(self, box_id: str) -> bool:
        box = self.boxes.pop(box_id, None)
        if box is None:
            return False
        box.end()
        self.ended.append(box)
        return True

    def hang_up(self) -> None:
        """Breaks every connection to a program, as a load balancer does; the programs continue."""
        self.hung_up.set()
        self.hung_up = asyncio.Event()

    def close(self) -> None:
        self.hang_up()
        for box_id in list(self.boxes):
            self.end(box_id)


async def never() -> None:
    """Longer than any caller waits."""
    await asyncio.sleep(3600)
