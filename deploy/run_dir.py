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
from penstock.common.registry import near_and_known
from penstock.deploy.config import RUN_FILE, RunConfig, code_files, dump_config
from penstock.deploy.recipe_tree import CODE, ConfigError

END_SUFFIX = ".end"
"""Suffix of the file, next to a role's log, with what its processes have used whose head had died before them."""
HEAD_LINE = "# head: "
"""Prefix in connect.env of the `process_identity` of the `penstock run` that wrote it."""

HEAD_SILENCE_S = 60.0
"""A head of which this machine knows no process, and that wrote nothing for this long, has ended."""

EVALUATION_SETTINGS = "settings.json"
"""A file that only the folder of an evaluation has."""


class RunDir:
    """The folder of a run, and the names in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / RUN_FILE
        self.code = root / CODE
        self.datasets = root / "datasets.json"
        """Digests of the datasets that the newest life reads, by setting."""
        self.identity = root / "run.id"
        """The run's id in the queue; made with the folder."""
        self.connect_env = root / "connect.env"
        """Addresses and secrets of the living run, readable by its owner alone; gone when the run ends."""
        self.logs = root / "logs"
        self.redis = root / "redis"
        self.data = root / "data"
        self.slurm = root / "slurm"
        """Scripts of `penstock slurm`, and its secrets, readable by their owner alone."""
        self.checkpoints = root / "checkpoints"
        self.archive = root / "archive"
        """Trained batches, unless transfer_queue.archive names another folder."""
        self.trajectories = root / "trajectories"
        self.metrics = root / "metrics.jsonl"
        self.steps = root / "steps.jsonl"
        self.evaluations = root / "eval.jsonl"
        self.timeline = root / "timeline.jsonl"
        self.weight_updates = root / "weight_updates.jsonl"
        """The queue's weight updates, written when the run ends: the queue is away then."""
        self.accounts = root / "accounts.json"
        """Tokens and seconds of the run by their use, see `CostAccounts`."""
        self.dead_letters = root / "dead_letters.jsonl"
        """The oldest dead letters, written when the run ends, for the same reason."""
        self.turns = root / "turns.jsonl"
        """Holders of the shared devices and their bytes, of a run in turns; written when it ends."""
        self.metric_addresses = root / "metrics"
        """One file per living role on this file system that serves metrics."""
        self.metrics_token = root / "metrics.token"
        """Opens the roles' metrics and nothing else; readable by its owner alone, gone when the run ends."""
        self.prometheus_targets = root / "prometheus-targets.json"
        """Targets for Prometheus' file-based discovery; gone when the run ends."""
        self.roles = root / "roles.json"
        """Processes of the living run on its machine, with their restarts; gone when the run ends."""
        self.lives = root / "lives.json"
        """Wall time and restarts of each `penstock run` of this run."""
        self.ended = root / "ended.json"
        """Why the run is over, once it is."""
        self.summary = root / "summary.json"
        self.plot = root / "reward.png"

    @classmethod
    def of(cls, config: RunConfig) -> RunDir:
        return cls((Path(config.runs_dir) / config.name).resolve())

    def saved_step(self, step: int | None = None) -> int:
        """Return `step` if there is a checkpoint of it; without it the newest one's. Raises `ConfigError`."""
        steps = sorted(
            int(path.name.removeprefix("step_")) for path in self.checkpoints.glob("step_*") if not path.suffix
        )
        if not steps or (step is not None and step not in steps):
            of_step = "" if step is None else f" of step {step}"
            raise ConfigError(f"{self.root} has no checkpoint{of_step}; there: {', '.join(map(str, steps)) or 'none'}")
        return steps[-1] if step is None else step

    def write_config(self, config: RunConfig) -> None:
        """Write the configuration as of a folder that may move, and copy the Python files that it names.

        The copies are what a run is continued with where the files are not, and what they are compared with elsewhere.
        """
        for file in code_files(config):
            if not file.is_relative_to(self.root):
                copy = self._copy_of(file)
                copy.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(copy, file.read_bytes())
        write_atomically(self.config, dump_config(config, self.root))

    def is_alive(self) -> bool:
        """Return True if the head that connect.env names has not ended. The lock may say nothing of another machine's.

        Of a head on another machine, or before a reboot of this one, the files tell: it writes lives.json every 5 s.
        """
        try:
            lines = self.connect_env.read_text(encoding="utf-8").splitlines()
            written = max((f.stat().st_mtime for f in (self.connect_env, self.lives) if f.exists()), default=0.0)
        except OSError:
            return False  # it has ended, ends at this moment, or is another user's
        head = next((line.removeprefix(HEAD_LINE) for line in lines if line.startswith(HEAD_LINE)), "")
        ended = process_has_ended(head)
        return time.time() - written < HEAD_SILENCE_S if ended is None else not ended

    def changed_code(self, config: RunConfig) -> list[Path]:
        """Return the Python files of `config` whose text is not the one that the run has a copy of."""
        copies = {file: self._copy_of(file) for file in code_files(config) if not file.is_relative_to(self.root)}
        return sorted(f for f, copy in copies.items() if copy.exists() and copy.read_bytes() != f.read_bytes())

    def _copy_of(self, file: Path) -> Path:
        return self.code / file.relative_to(file.anchor)


def no_such_run(runs: Path, name: str) -> str:
    """The message for a run that is not in this folder of runs."""
    names = sorted(file.parent.name for file in runs.glob("*/config.yaml") if not _is_untrained(file.parent))
    if not names:
        return f"{runs / name}: no such run; give its folder, or start it with `penstock run`"
    return f"{runs / name}: no such run; {near_and_known(name, names)}"


def has_begun(run: RunDir) -> bool:
    """Returns whether there is anything that `--resume` could continue."""
    return run.root.is_dir() and any(run.root.iterdir())


def require_run(run: RunDir) -> None:
    """Raises `ConfigError` if there is nothing that `--resume` could continue."""
    if not has_begun(run):
        fix = "set name=… of an earlier run, or leave out --resume, which starts this one"
        raise ConfigError(f"name: {no_such_run(run.root.parent, run.root.name)}\n  fix: {fix}")


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
        if not self._resume and _is_untrained(root):
            _forget(RunDir(root))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


def _is_untrained(root: Path) -> bool:
    """Return True if a run ended here, or was killed, and trained no step."""
    run = RunDir(root)
    if run.is_alive():
        return False
    files = (run.metrics, run.steps, run.evaluations)
    # Of step 0 is what a run leaves that failed in its first step.
    saved = [path for path in run.checkpoints.glob("*") if not path.name.startswith("step_00000000")]
    folders = (*saved, run.archive, run.trajectories, root / "model")
    return (
        (run.config.exists() or run.identity.exists())
        and not any(file.exists() and file.stat().st_size for file in files)
        and not any(folder.exists() and any(folder.rglob("*.*")) for folder in folders)
    )


def _forget(run: RunDir) -> None:
    """Removes what a run leaves that trained no step; its logs stay, new lines come behind them."""
    for folder in (run.redis, run.metric_addresses, run.checkpoints):
        shutil.rmtree(folder, ignore_errors=True)
    records = (
        run.ended,
        run.summary,
        run.roles,
        run.lives,
        run.timeline,
        run.weight_updates,
        run.turns,
        run.dead_letters,
        run.accounts,
    )
    for file in (run.connect_env, run.config, run.identity, *run.logs.glob(f"*{END_SUFFIX}"), *records):
        file.unlink(missing_ok=True)


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
        """Records the present life; returns at once if it was recorded lately and `restarts` may wait."""
        if self._clock() - self._written >= 5.0:
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
