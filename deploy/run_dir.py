"""What a run leaves on disk, and the lock that keeps two runs out of one folder."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from penstock.deploy.config import RunConfig
from penstock.deploy.load_config import ConfigError


@dataclass(frozen=True)
class RunDir:
    """runs/NAME and the names in it, said once."""

    root: Path

    @classmethod
    def of(cls, config: RunConfig) -> RunDir:
        return cls((Path(config.runs_dir) / config.name).resolve())

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def connect_env(self) -> Path:
        """Addresses and secrets of the living run, readable by its owner alone; gone when the run ends."""
        return self.root / "connect.env"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def slurm(self) -> Path:
        """Scripts of `penstock slurm`, and its secrets, readable by their owner alone."""
        return self.root / "slurm"

    @property
    def redis(self) -> Path:
        return self.root / "redis"

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def batches(self) -> Path:
        """Trained trajectories that wait for their commit."""
        return self.root / "batches"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def steps(self) -> Path:
        return self.root / "steps.jsonl"

    @property
    def evaluations(self) -> Path:
        return self.root / "eval.jsonl"

    @property
    def weight_updates(self) -> Path:
        """The queue's weight updates, written when the run ends: the queue is away then."""
        return self.root / "weight_updates.jsonl"

    @property
    def timeline(self) -> Path:
        return self.root / "timeline.jsonl"

    @property
    def trajectories(self) -> Path:
        return self.root / "trajectories"

    @property
    def metric_addresses(self) -> Path:
        """One file per living role on this file system that serves metrics."""
        return self.root / "metrics"

    @property
    def metrics_token(self) -> Path:
        """Opens the roles' metrics and nothing else; readable by its owner alone, gone when the run ends."""
        return self.root / "metrics.token"

    @property
    def prometheus_targets(self) -> Path:
        """For Prometheus' file-based discovery; gone when the run ends."""
        return self.root / "prometheus-targets.json"

    @property
    def ended(self) -> Path:
        """Why the run is over, once it is."""
        return self.root / "ended.json"

    @property
    def roles(self) -> Path:
        """Processes of the living run on its machine, with their restarts; gone when the run ends."""
        return self.root / "roles.json"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def plot(self) -> Path:
        return self.root / "reward.png"


class RunLock:
    """Held while a run lives; the operating system lets go of it when the process dies, however it dies."""

    def __init__(self, run: RunDir, *, resume: bool) -> None:
        self._run = run
        self._resume = resume
        self._file: IO[str] | None = None

    def __enter__(self) -> RunLock:
        root = self._run.root
        used = root.exists() and any(root.iterdir())
        root.mkdir(parents=True, exist_ok=True)
        self._file = (root / "lock").open("a+")
        os.set_inheritable(self._file.fileno(), False)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ConfigError(
                f"name: a run called {root.name!r} is going on in {root}; choose another name=…"
            ) from None
        if used and not self._resume:
            self._file.close()
            raise ConfigError(f"name: {root} holds an earlier run; --resume goes on with it, name=… starts another")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
