"""A `penstock run` in a separate process: its parts by role, killed at will, continued by ``--resume``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from penstock.deploy import ConfigError, RunConnection
from penstock.transfer_queue import QueueError, TransferQueueConfig
from penstock.weight_sync import Manifest

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPE = REPOSITORY / "recipes" / "calculator.yaml"
SUPERVISOR = "supervisor"
ROLES = {
    "agent": "penstock.deploy.cli agent",
    "rollout": "penstock.deploy.cli rollout",
    "engine": "engines.hf.server",
    "trainer": "train-rank",
    "redis": "redis-server",
}
"""Role → what the command line of its process holds."""
SMALL = (
    *("groups_per_step=2", "group_size=4", "data.eval_limit=8", "trainer.checkpoint_every=2"),
    *("agent.max_restarts=100000", "rollout.max_restarts=100000", "trainer.max_restarts=100000"),
)
STOP_TIMEOUT_S = 180.0
LOOK_S = 1.0


class EndedEarly(Exception):
    """The run ended although its supervisor was not killed; with the end of its log."""


class SoakRun:
    """Owns the process. `started`, `workers`, `ports`: what `note` has seen of the run's parts, see `left_behind`.

    `contents`: version → states of the tensors that were announced under that number, over all starts of the run.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self.root = folder / name
        self._log = folder / f"{name}.log"
        self.started: dict[int, float] = {}
        self.workers: set[int] = set()
        self.ports: set[int] = set()
        self.contents: dict[int, set[str]] = defaultdict(set)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *overrides: str, steps: int, resume: bool = False) -> None:
        words = [f"name={self.root.name}", f"runs_dir={self._folder}", f"trainer.steps={steps}", *SMALL, *overrides]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "penstock.deploy.cli", "run", str(RECIPE), *words, *(["--resume"] * resume)],
                stdout=log,
                stderr=log,
                cwd=REPOSITORY,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src")},
            )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def check(self) -> None:
        assert self._process is not None
        if (code := self._process.poll()) is not None:
            raise EndedEarly(f"exit status {code}: {self.tail()}")

    def parts(self) -> Iterator[tuple[str, psutil.Process]]:
        """(role, process) of all that live; what belongs to none of the roles has the role ``other``."""
        try:
            family = [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in family:
            try:
                if process.status() != psutil.STATUS_ZOMBIE:
                    yield self._role(process), process
            except psutil.NoSuchProcess:
                continue

    def _role(self, process: psutil.Process) -> str:
        if process.pid == self.pid:
            return SUPERVISOR
        command = " ".join(process.cmdline())
        return next((role for role, words in ROLES.items() if words in command), "other")

    def note(self) -> dict[str, list[tuple[float, int]]]:
        """Role → (age in seconds, resident bytes) of its processes now. Boxes are made and gone between two looks."""
        self.note_version()
        found: dict[str, list[tuple[float, int]]] = {}
        listening = [each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        for role, process in self.parts():
            try:
                self.started[process.pid] = process.create_time()
                if role == "agent":
                    self.workers.add(process.pid)
                self.ports |= {each.laddr.port for each in listening if each.pid == process.pid}
                age = time.time() - process.create_time()
                found.setdefault(role, []).append((age, process.memory_info().rss))
            except psutil.Error:
                continue
        return found

    def note_version(self) -> None:
        """Add the newest version to `contents`. Does nothing while the run has no queue."""
        with contextlib.suppress(FileNotFoundError, ConfigError, QueueError):
            link = RunConnection.from_lines((self.root / "connect.env").read_text())
            if newest := asyncio.run(_newest_version(link)):
                version, state = newest
                self.contents[version].add(state)

    def versions_with_two_contents(self) -> int:
        """Return how many version numbers were announced with more than one set of weights."""
        return sum(len(states) > 1 for states in self.contents.values())

    def kill(self, pid: int) -> bool:
        """False where it has ended already."""
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        if pid == self.pid:
            assert self._process is not None
            self._process.wait(STOP_TIMEOUT_S)
        return True

    def limit_files(self, pid: int, size: int) -> None:
        """A file of `pid` that grows beyond `size` bytes fails as on a disk without room."""
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, size))

    def cut_log(self) -> bool:
        """The newest file of the archive ends early. False where there is none."""
        for path in sorted((self.root / "archive" / "batches").glob("*.parquet"), reverse=True):
            with contextlib.suppress(FileNotFoundError):  # committed meanwhile
                os.truncate(path, path.stat().st_size - 1)
                return True
        return False

    def stop(self) -> None:
        """As Ctrl-C does; by SIGTERM, since SIGINT is ignored below `nohup` until the run has set its own handler."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(STOP_TIMEOUT_S)

    def finish(self, timeout_s: float) -> dict[str, Any]:
        """The summary of a run that comes to its end. Raises `EndedEarly` where it fails."""
        assert self._process is not None
        deadline = time.monotonic() + timeout_s
        while self._process.poll() is None:
            if time.monotonic() > deadline:
                raise EndedEarly(f"it did not end within {timeout_s:.0f} s: {self.tail()}")
            self.note()
            time.sleep(LOOK_S)  # nothing else waits in this process
        if (code := self._process.returncode) != 0:
            raise EndedEarly(f"exit status {code}: {self.tail()}")
        summary: dict[str, Any] = json.loads((self.root / "summary.json").read_text())
        return summary

    def end(self) -> None:
        """Nothing of it lives on."""
        assert self._process is not None
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(STOP_TIMEOUT_S)

    def steps(self) -> int:
        """Trained ones, each as often as it was trained: steps after the newest checkpoint are trained again."""
        metrics = self.root / "metrics.jsonl"
        return metrics.read_text().count("\n") if metrics.exists() else 0

    def newest_step(self) -> int:
        metrics = self.root / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return max((json.loads(line)["step"] + 1 for line in lines), default=0)

    def tail(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]


async def _newest_version(link: RunConnection) -> tuple[int, str] | None:
    """Return the newest version that is announced and the state of its tensors; None before the first."""
    queue = await link.connect(TransferQueueConfig(deadline_s=LOOK_S))
    try:
        current = await queue.latest_version()
    finally:
        await queue.close()
    return (current.version, Manifest.parse(current.manifest).state) if current is not None else None
