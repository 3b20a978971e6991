"""Tries of a bisection: a stretch of the run is replayed without some episodes, and its weights are evaluated.

    penstock replay --from START --to END --without …  ──► final_model ──► episodes on the tasks of the step that fell
        (checkpoint and archive, no server)                                (the run's loop, tools, reward, temperature)
                                                                                   │
    tries.jsonl: a line per try, by the digest of what it depends on  ◄── mean ────┘

The weights are judged by new episodes. Archived ones of other policies cannot replace them: a policy before a collapse
and one after it have too few likely samples in common for importance weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Console

from penstock.common import append_jsonl, read_jsonl
from penstock.deploy.bisection.collapse import METRICS, Stretch
from penstock.deploy.bisection.search import OutOfTries
from penstock.deploy.evaluation.statistics import estimate
from penstock.deploy.recipe_tree import ConfigError

if TYPE_CHECKING:
    from penstock.deploy.evaluation.episodes import EpisodeResult
    from penstock.trainer import DatasetRow


@dataclass(frozen=True, slots=True)
class TryResult:
    """The metric of the weights of one try."""

    value: float | None
    """A mean over tasks; None if the episodes cannot be replayed that way."""
    low: float | None = None
    high: float | None = None
    refused: str | None = None
    """The reason why a batch could not be trained."""

    def is_close_to(self, below: float) -> bool:
        """Return whether the interval includes the bound: other samples might have decided otherwise."""
        return self.low is not None and self.high is not None and self.low <= below <= self.high

    def in_words(self, metric: str, below: float) -> str:
        if self.value is None:
            return f"undecided: {self.refused}"
        verdict = "below" if self.value < below else "not below"
        return f"{metric} {self.value:.4g} [{self.low:.4g}, {self.high:.4g}], {verdict} {below:g}"


@dataclass(frozen=True, slots=True)
class Judgement:
    """Settings that decide a try's verdict."""

    metric: str
    below: float
    rows: Sequence[DatasetRow]
    """Tasks of the step that shows the fall."""
    samples: int
    """Episodes per task."""
    temperature: float


@dataclass
class Tries:
    """The tries of one bisection, in a folder of their own; those of an earlier call are not repeated."""

    root: Path
    """Folder of the run."""
    folder: Path
    most: int
    judgement: Judgement
    console: Console
    results: list[TryResult] = field(default_factory=list)
    """Results that this search used, repeated ones once."""

    def __post_init__(self) -> None:
        self._file = self.folder / "tries.jsonl"
        self._known = {line.pop("key"): TryResult(**line) for line in read_jsonl(self._file)}
        self._used: set[str] = set()

    def __call__(self, stretch: Stretch, left_out: Collection[str | int], label: str) -> TryResult:
        """Return the result of the stretch without these steps or episodes. Raises `OutOfTries`, `ConfigError`, and
        what an evaluation raises."""
        key = self._key(stretch, left_out)
        if key not in self._used:
            if len(self._used) >= self.most:
                raise OutOfTries
            self._used.add(key)
            if key not in self._known:
                result = self._carry_out(stretch, left_out)
                append_jsonl(self._file, [{"key": key, **asdict(result)}])
                self._known[key] = result
            self.results.append(self._known[key])
            words = self._known[key].in_words(self.judgement.metric, self.judgement.below)
            self.console.print(f"try {len(self._used)}: {label}: {words}", markup=False, soft_wrap=True)
        return self._known[key]

    def undoes(self, stretch: Stretch, left_out: Collection[str | int], label: str) -> bool:
        """Return whether the metric is not below the bound without these. A try that cannot be trained undoes
        nothing."""
        value = self(stretch, left_out, label).value
        return value is not None and value >= self.judgement.below

    def _key(self, stretch: Stretch, left_out: Collection[str | int]) -> str:
        rows = [(row.data_source, row.messages, row.ground_truth) for row in self.judgement.rows]
        judged = (self.judgement.metric, self.judgement.samples, self.judgement.temperature, rows)
        text = repr((stretch.start, stretch.end, sorted(map(str, left_out)), judged))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def _carry_out(self, stretch: Stretch, left_out: Collection[str | int]) -> TryResult:
        scratch = self.folder / "try"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        replayed = self._replay(stretch, left_out, scratch / "replay")
        if replayed["refused"]:
            return TryResult(None, refused=replayed["refused"])
        results = self._evaluate(scratch)
        shutil.rmtree(scratch)
        by_task: dict[int, list[float]] = {}
        for one in results:
            by_task.setdefault(one.row, []).append(float(getattr(one, METRICS[self.judgement.metric])))
        return TryResult(**asdict(estimate([fmean(values) for values in by_task.values()])))

    def _replay(self, stretch: Stretch, left_out: Collection[str | int], folder: Path) -> Mapping[str, Any]:
        """Raises `ConfigError` with the last lines of a replay that failed."""
        words = ["replay", str(self.root), "--from", str(stretch.start), "--to", str(stretch.end), "--out", str(folder)]
        words += [word for one in left_out for word in ("--without", str(one))]
        log = self.folder / "replay.log"
        with log.open("wb") as output:
            done = subprocess.run(
                [sys.executable, "-m", "penstock.deploy.cli", *words],
                stdout=output,
                stderr=output,
                env={**os.environ, "PENSTOCK_SUPERVISED": "1", "TOKENIZERS_PARALLELISM": "false"},
                check=False,
            )
        file = folder / "replay.json"
        if not file.is_file():
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
            raise ConfigError(f"penstock {' '.join(words[:6])} ended with status {done.returncode}; see {log}\n{tail}")
        result: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return result

    def _evaluate(self, scratch: Path) -> list[EpisodeResult]:
        """Raises `ConfigError` if no episode has a result, and what `evaluate_plan` raises."""
        from penstock.deploy.evaluation.head import evaluate_plan
        from penstock.deploy.evaluation.target import EvalRequest, resolve_target

        judgement = self.judgement
        request = EvalRequest(
            self.root,
            [f"runs_dir={scratch}"],
            checkpoint=str(scratch / "replay" / "final_model"),
            samples=judgement.samples,
            temperature=judgement.temperature,
            split="train",
            rows=1,
            name="evaluation",
        )
        plan = replace(resolve_target(request), rows=judgement.rows)
        with (self.folder / "evaluation.log").open("w", encoding="utf-8") as log:
            results = evaluate_plan(plan, Console(file=log, width=200))
        if not results:
            raise ConfigError(f"no episode of the replayed weights has a reward; see {plan.run.logs}")
        return results
