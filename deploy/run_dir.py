"""The files of a run: its folder, and the lock against a second run in it."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType

from penstock.common import FileLock, process_has_ended, write_atomically
from penstock.deploy.config import ConfigError, RunConfig

HEAD_LINE = "# head: "
"""In connect.env, before the `process_identity` of the `penstock run` that wrote it."""


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
    def identity(self) -> Path:
        """The run's id, which the queue knows it by; made with the folder."""
        return self.root / "run.id"

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
    def turns(self) -> Path:
        """Who held the shared devices, and how much of them, of a run in turns; written when it ends."""
        return self.root / "turns.jsonl"

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
    def lives(self) -> Path:
        """Wall time and restarts of each `penstock run` of this run."""
        return self.root / "lives.json"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def plot(self) -> Path:
        return self.root / "reward.png"


def no_such_run(runs: Path, name: str) -> str:
    """The message for a run that is not in this folder of runs."""
    found = sorted(file.parent.name for file in runs.glob("*/config.yaml"))
    others = f"there are: {', '.join(found)}" if found else "give its folder, or start it with `penstock run`"
    return f"{runs / name}: no such run; {others}"


class RunLock:
    """Held while a run lives; the operating system releases it when the process dies."""

    def __init__(self, run: RunDir, *, resume: bool) -> None:
        self._root = run.root
        self._resume = resume
        self._lock = FileLock(run.root / "lock", "another run is running there")

    def __enter__(self) -> RunLock:
        root = self._root
        used = root.exists() and any(root.iterdir()) and not _is_untrained(root)
        root.mkdir(parents=True, exist_ok=True)
        if not self._lock.try_acquire():
            raise ConfigError(f"name: a run called {root.name!r} is running in {root}; choose another name=…")
        if used and not self._resume:
            self._lock.release()
            raise ConfigError(f"name: {root} holds an earlier run; --resume continues it, name=… starts another")
        if not self._resume:
            _forget_untrained(root)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


def _is_untrained(root: Path) -> bool:
    """A run ended here, or was killed, and trained no step."""
    run = RunDir(root)
    files = (run.metrics, run.steps, run.evaluations)
    folders = (run.checkpoints, run.batches, run.trajectories, root / "model")
    return (
        (run.config.exists() or run.identity.exists())
        and not _may_live(run)
        and not any(file.exists() and file.stat().st_size for file in files)
        and not any(folder.exists() and any(folder.rglob("*.*")) for folder in folders)
    )


def _may_live(run: RunDir) -> bool:
    """A living run has a connect.env, which names its head: the lock may say nothing of one on another machine."""
    try:
        text = run.connect_env.read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
    head = next((line.removeprefix(HEAD_LINE) for line in text.splitlines() if line.startswith(HEAD_LINE)), "")
    return not process_has_ended(head)


def _forget_untrained(root: Path) -> None:
    """What a run leaves that trained no step; its logs stay, new lines come behind them."""
    run = RunDir(root)
    if not _is_untrained(root):
        return
    for folder in (run.redis, run.metric_addresses):
        shutil.rmtree(folder, ignore_errors=True)
    for file in (
        run.connect_env,
        run.config,
        run.identity,
        run.ended,
        run.summary,
        run.roles,
        run.lives,
        run.timeline,
        run.weight_updates,
        run.turns,
    ):
        file.unlink(missing_ok=True)


WRITE_S = 5.0


@dataclass(frozen=True, slots=True)
class RunLife:
    """One `penstock run`, from its first role to its end."""

    wall_s: float
    restarts: Mapping[str, int] = field(default_factory=dict)
    """Role to how often it was started again."""


@dataclass(frozen=True, slots=True)
class LivesTotal:
    """All lives of a run."""

    lives: int
    wall_s: float
    restarts: Mapping[str, int]


class LivesFile:
    """The lives so far, and the present one, which begins with this object."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._earlier = read_lives(path)
        self._began = clock()
        self._written = -math.inf

    def write(self, restarts: Mapping[str, int]) -> None:
        """Records the present life; returns at once where it was recorded lately and `restarts` may wait."""
        if self._clock() - self._written >= WRITE_S:
            self.total(restarts)

    def total(self, restarts: Mapping[str, int]) -> LivesTotal:
        """Records the present life, and sums up."""
        now = self._clock()
        lives = [*self._earlier, RunLife(now - self._began, dict(restarts))]
        write_atomically(self._path, json.dumps([asdict(life) for life in lives]) + "\n")
        self._written = now
        counts = Counter[str]()
        for life in lives:
            counts.update(life.restarts)
        # `Counter` keeps roles that were never started again: a role of the run is named with its 0.
        return LivesTotal(len(lives), sum(life.wall_s for life in lives), dict(counts))


def read_lives(path: Path) -> list[RunLife]:
    """Empty where the run has none, and where the file cannot be read."""
    try:
        return [RunLife(float(entry["wall_s"]), dict(entry["restarts"])) for entry in json.loads(path.read_text())]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return []
