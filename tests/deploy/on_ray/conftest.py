"""A real Ray cluster on this machine, one `ray start` per node, with a token, on free ports of loopback alone."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

REPOSITORY = Path(__file__).parents[3]
PYTHON_BIN = Path(sys.executable).parent
STORE_BYTES = 80 << 20
QUICK_TO_NOTICE = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
}
"""A node that died is given up after some seconds, not half a minute."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Node:
    """One `ray start --block`: its process, and everything below it."""

    def __init__(self, log: Path, *words: str, env: dict[str, str]) -> None:
        self.log = log
        argv = [str(PYTHON_BIN / "ray"), "start", "--block", "--disable-usage-stats", "--node-ip-address=127.0.0.1"]
        ports = ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [*argv, f"--object-store-memory={STORE_BYTES}", *ports, *words],
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                cwd=REPOSITORY,
                env=env,
                start_new_session=True,
            )

    def below(self, *words: str) -> list[psutil.Process]:
        """Living processes of this node whose command line holds all the words."""
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if child.status() != psutil.STATUS_ZOMBIE and all(w in " ".join(child.cmdline()) for w in words):
                        found.append(child)
        return found

    def kill_raylet(self) -> None:
        """As when the machine dies: nobody is told."""
        (raylet,) = [p for p in self.below() if p.name() == "raylet"]
        raylet.kill()

    def end(self) -> None:
        """Never `ray stop`: it ends every Ray of the machine."""
        children = self.below()
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        for leftover in (*children, psutil.Process(self.process.pid) if self.process.poll() is None else None):
            if leftover is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    leftover.kill()


class RayCluster:
    """A head without CPUs, so that every role runs on a node that may die, and the nodes that `add` starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token = secrets.token_hex(32)
        self.address = f"127.0.0.1:{free_port()}"
        own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token, "RAY_ADDRESS": self.address}
        self.env = {**os.environ, **own, **QUICK_TO_NOTICE, "PYTHONPATH": str(REPOSITORY / "src")}
        port = self.address.partition(":")[2]
        head = ("--head", f"--port={port}", f"--temp-dir={folder}", "--include-dashboard=false")
        self.head = self._start("head", *head, cpus=0)
        self.nodes: list[Node] = []

    def add(self, cpus: int) -> Node:
        node = self._start(f"node-{len(self.nodes)}", f"--address={self.address}", cpus=cpus)
        self.nodes.append(node)
        return node

    def _start(self, name: str, *words: str, cpus: int) -> Node:
        return Node(self.folder / f"{name}.log", f"--num-cpus={cpus}", "--num-gpus=0", *words, env=self.env)

    def wait_for_nodes(self, count: int, timeout_s: float = 60) -> None:
        """Until the head and `count` nodes answer."""
        code = (
            "import ray, sys; ray.init(address='auto', log_to_driver=False, configure_logging=False);"
            f" sys.exit(sum(n['Alive'] for n in ray.nodes()) < {count + 1})"
        )
        deadline = time.monotonic() + timeout_s
        while (ended := self.python(code)).returncode:
            assert time.monotonic() < deadline, f"no cluster of {count} nodes:\n{ended.stderr[-2000:]}\n{self.tail()}"
            time.sleep(0.5)

    def python(self, code: str) -> subprocess.CompletedProcess[str]:
        """A program that knows the cluster."""
        argv = [sys.executable, "-c", code]
        return subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=90, check=False)

    def penstock(self, *words: str) -> dict[str, Any]:
        """A `penstock` command that prints JSON."""
        argv = [sys.executable, "-m", "penstock.deploy.cli", *words]
        ended = subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)

    def tail(self) -> str:
        logs = [self.head.log, *(node.log for node in self.nodes)]
        return "\n".join(f"== {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)

    def text_of_logs(self) -> str:
        """Everything that Ray wrote down."""
        files = (file for file in self.folder.rglob("*") if file.is_file() and not file.is_socket())
        return "\n".join(file.read_text(errors="replace") for file in files)

    def end(self) -> None:
        for node in (*self.nodes, self.head):
            node.end()
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'penstock[ray]'")
    # Ray's sockets lie in this folder: a longer path would pass the kernel's 107 bytes.
    found = RayCluster(Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp")))
    try:
        yield found
    finally:
        found.end()


def kill(process: psutil.Process) -> None:
    process.send_signal(signal.SIGKILL)
