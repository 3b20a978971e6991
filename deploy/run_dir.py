"""The files of a run: its folder, the lock against a second run in it, and the folders of its published weights."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from xxhash import xxh3_64_hexdigest

from penstock.common import FileLock
from penstock.deploy.config import ConfigError, RunConfig

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - files there belong to one run, mode 0600, and the run removes them


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
    """Held while a run lives; the operating system releases it when the process dies."""

    def __init__(self, run: RunDir, *, resume: bool) -> None:
        self._root = run.root
        self._resume = resume
        self._lock = FileLock(run.root / "lock", "another run is running there")

    def __enter__(self) -> RunLock:
        root = self._root
        used = root.exists() and any(root.iterdir())
        root.mkdir(parents=True, exist_ok=True)
        if not self._lock.try_acquire():
            raise ConfigError(f"name: a run called {root.name!r} is running in {root}; choose another name=…")
        if used and not self._resume:
            self._lock.release()
            raise ConfigError(f"name: {root} holds an earlier run; --resume continues it, name=… starts another")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


def weights_dir(config: RunConfig) -> Path:
    """Shared memory, also where HTTP serves them; or the run's folder on a shared disk."""
    if config.rollout.weight_transport == "disk":
        return RunDir.of(config).root / "weights"
    return local_weights_dir(config)


def local_weights_dir(config: RunConfig) -> Path:
    """Where servers of this machine keep what they fetched or merged; under a shared disk not that disk.

    Runs of one name in two folders have two of them: the first to end would take the other's weights away.
    """
    place = xxh3_64_hexdigest(bytes(RunDir.of(config).root))[:8]
    return SHARED_MEMORY / f"penstock-{config.name}-{place}"


def remove_weights(config: RunConfig) -> None:
    """Both folders, of this machine; no role of the run reads them any more."""
    for directory in {weights_dir(config), local_weights_dir(config)}:
        shutil.rmtree(directory, ignore_errors=True)
