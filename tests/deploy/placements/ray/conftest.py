"""A real Ray cluster of several nodes on this machine, with a token, on loopback alone."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.living import living_below

REPOSITORY = Path(__file__).parents[4]
QUICK_TO_NOTICE = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "30000",
    "RAY_health_check_failure_threshold": "5",
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_worker_niceness": "0",  # Ray's default of 15 starves roles on a busy machine
}
"""A node that refuses connections is given up after some seconds; one that is slow, on a busy machine, is not.

Nor does Ray kill workers for what others take of this machine's memory."""
ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Ray then takes 127.0.0.1 for an address instead of the machine's own; see docs/guide/cluster.md."""


@dataclass(frozen=True)
class Node:
    raylet: int

    def below(self, *words: str) -> list[psutil.Process]:
        """Living processes of this node whose command line holds all the words."""
        return living_below(self.raylet, *words)

    def kill(self) -> None:
        """As when the machine dies: everything on it, and nobody is told. The raylet first: it would tell."""
        raylet = psutil.Process(self.raylet)
        for process in [raylet, *raylet.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


class RayCluster:
    """A head without CPUs, so that every role runs on a node that may die, and the nodes that `add` starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token = secrets.token_hex(32)
        own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token, "RAY_USAGE_STATS_ENABLED": "0", **ON_LOOPBACK}
        self.settings = {**own, **QUICK_TO_NOTICE}
        self.env = {**os.environ, **self.settings, "PYTHONPATH": str(REPOSITORY / "src")}
        self.env["RAY_TMPDIR"] = str(folder)
        with (folder / "nodes.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("nodes.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=REPOSITORY,
                env=self.env,
                start_new_session=True,
            )
        self.nodes: list[Node] = []
        try:
            self.address = self._start(cpus=0)["address"]
        except BaseException:
            self.end()
            raise
        self.env["RAY_ADDRESS"] = self.address

    def add(self, cpus: int) -> Node:
        """Returns when the cluster knows it."""
        self.nodes.append(Node(self._start(cpus)["raylet"]))
        return self.nodes[-1]

    def _start(self, cpus: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{cpus}\n")
        self.process.stdin.flush()
        told = self.process.stdout.readline()
        assert told, (self.folder / "nodes.log").read_text()[-3000:]
        return json.loads(told)

    def python(self, code: str) -> subprocess.CompletedProcess[str]:
        """A program that knows the cluster."""
        argv = [sys.executable, "-c", code]
        return subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=120, check=False)

    def penstock(self, *words: str) -> dict[str, Any]:
        """A `penstock` command that prints JSON."""
        argv = [sys.executable, "-m", "penstock.deploy.cli", *words]
        ended = subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)

    def processes(self) -> list[psutil.Process]:
        return living_below(self.process.pid)

    def text_of_logs(self) -> str:
        """Everything that Ray wrote down."""
        files = (file for file in self.folder.rglob("*") if file.is_file() and not file.is_socket())
        return "\n".join(file.read_text(errors="replace") for file in files)

    def end(self) -> None:
        """Never `ray stop`: it ends every Ray of the machine."""
        children = self.processes() if self.process.poll() is None else []
        assert self.process.stdin is not None
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        for leftover in (*children, self.process):
            with contextlib.suppress(psutil.NoSuchProcess):
                leftover.kill()
        self.process.wait(60)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayCluster]:
    """Whoever is started from this test knows its token."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'penstock[ray]'")
    # Ray's sockets lie in this folder: a longer path would pass the kernel's 107 bytes.
    found = RayCluster(Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp")))
    for name, value in found.settings.items():
        monkeypatch.setenv(name, value)
    try:
        yield found
    finally:
        found.end()
