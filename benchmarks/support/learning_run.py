"""Runs of `penstock bench learning`: launched by `penstock run`, kept in a folder and summarised."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from benchmarks.support import far_python, uncorrected
from benchmarks.support.child import ROOT, stop_run
from benchmarks.support.comparison import say
from penstock.common import JsonlTail, last_by, read_jsonl
from penstock.deploy import RunDir, RunLock, load_config

CALCULATOR = "recipes/calculator.yaml"
"""The recipe whose tool may be far away."""
NONE = "none"
WORKERS = 2
LONGEST_WAITS = 30.0
"""A tool's longest wait, in medians: at sigma 1 one call in three thousand would take longer."""
POLL_S = 1.0


class RunFailed(Exception):
    """`penstock run` ended with an error; the message ends with its last lines."""


@dataclass(frozen=True)
class Common:
    """What all runs of a sweep have alike."""

    engine: str
    steps: int
    groups: int
    group_size: int
    tool_median_s: float
    tool_sigma: float
    timeout_s: float
    """Of one run."""
    tool_longest_s: float | None = None
    """Where waits are cut; None: at `LONGEST_WAITS` medians."""
    concurrency: int | None = None
    """agent.concurrency; None: all that admission lets in is under way at once, so that what is compared is the
    staleness, not a worker's room."""
    recipe: str = CALCULATOR

    def digest(self) -> str:
        """Return the name of the folder: runs with other settings or of another format are kept apart."""
        settings = {name: value for name, value in asdict(self).items() if value is not None and name != "timeout_s"}
        settings |= {"text": (ROOT / self.recipe).read_text(), "curve": [field.name for field in fields(Curve)]}
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:10]


@dataclass(frozen=True)
class LearningRun:
    staleness: int
    """max_staleness: 0 sync, 1 one_step_off, 2 fully_async"""
    correction: str
    """A registered one, or ``none``"""
    seed: int

    @property
    def name(self) -> str:
        return f"s{self.staleness}-{self.correction}-seed{self.seed}"

    def overrides(self, common: Common, folder: Path) -> list[str]:
        """Return the settings of this run, on top of the recipe's."""
        episodes = common.groups * common.group_size * (self.staleness + 1)
        return [
            f"name={self.name}",
            f"runs_dir={folder}",
            f"seed={self.seed}",
            f"max_staleness={self.staleness}",
            f"group_size={common.group_size}",
            f"groups_per_step={common.groups}",
            "data.eval=null",
            f"agent.workers={WORKERS}",
            f"agent.concurrency={common.concurrency or -(-episodes // WORKERS)}",
            f"rollout.engine={common.engine}",
            f"trainer.steps={common.steps}",
            f"trainer.correction={uncorrected.PATH if self.correction == NONE else self.correction}",
            f"trainer.checkpoint_every={common.steps}",
            "trainer.keep_checkpoints=1",
            "trainer.save_trajectories=0",
            *(self._far_away(common) if common.recipe == CALCULATOR else ()),
        ]

    def _far_away(self, common: Common) -> list[str]:
        longest_s = common.tool_longest_s or LONGEST_WAITS * common.tool_median_s
        waits = {"median_s": common.tool_median_s, "sigma": common.tool_sigma, "longest_s": longest_s}
        tool = {"name": far_python.PATH, "timeout_s": longest_s + 10, "settings": waits}
        train = f"data.train=generate:calculator/train?train=4096&eval=128&seed={self.seed}"
        return [train, f"tools={json.dumps([tool])}"]


@dataclass(frozen=True)
class Curve:
    """What a finished run has shown, by step."""

    wall_s: tuple[float, ...]
    """From when the trainer first asked for a batch to the end of the step"""
    reward: tuple[float, ...]
    staleness: tuple[float, ...]
    """Mean over tokens"""
    waited_s: tuple[float, ...]
    """Of the step's time, the trainer waiting for its batch"""
    tokens: tuple[int, ...]
    """Sampled tokens that the step trained"""

    @classmethod
    def of(cls, rows: Sequence[dict[str, Any]]) -> Curve:
        """`rows`: lines of metrics.jsonl."""
        walls, now = [], 0.0
        for row in rows:
            now += row["wall_s"]
            walls.append(round(now, 3))
        return cls(
            tuple(walls),
            tuple(row["reward"] for row in rows),
            tuple(row["staleness_mean"] for row in rows),
            tuple(row["wait_s"] for row in rows),
            tuple(row["tokens_trained"] for row in rows),
        )


def finished(run: LearningRun, folder: Path) -> Curve | None:
    """What an earlier call has measured; None where there is nothing whole."""
    file = folder / run.name / "curve.json"
    return Curve(**json.loads(file.read_text())) if file.exists() else None


def carry_out(run: LearningRun, common: Common, folder: Path) -> Curve:
    """From start to end. What is left of an interrupted one goes: its clock did not run on. Raises `RunFailed`."""
    overrides = run.overrides(common, folder)
    place = RunDir.of(load_config(ROOT / common.recipe, overrides))
    if place.root.exists():
        with RunLock(place, resume=True):  # raises where it is going on
            shutil.rmtree(place.root)
    log = folder / f"{run.name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            _command(common.recipe, overrides), stdout=output, stderr=output, env=run_environment(), cwd=ROOT
        )
        try:
            _follow(process, run, common, place)
        finally:
            stop_run(process)
    if process.returncode:
        raise RunFailed(f"{run.name}: exit status {process.returncode}, see {log}\n{log.read_text()[-2000:]}")
    curve = Curve.of(last_by(read_jsonl(place.metrics), "step"))
    if len(curve.wall_s) != common.steps:
        raise RunFailed(f"{run.name}: {len(curve.wall_s)} of {common.steps} steps are in {place.metrics}")
    _write(place.root / "curve.json", asdict(curve))
    return curve


def _command(recipe: str, overrides: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "penstock.deploy.cli", "run", recipe, *overrides]


def run_environment() -> dict[str, str]:
    """Roles import the tool and the correction from this repository."""
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _follow(process: subprocess.Popen[bytes], run: LearningRun, common: Common, place: RunDir) -> None:
    """Say now and then how far it is. Raises `RunFailed` past the deadline."""
    tail, deadline = JsonlTail(place.metrics), time.monotonic() + common.timeout_s
    every = max(1, common.steps // 5)
    while process.poll() is None:
        if time.monotonic() > deadline:
            raise RunFailed(
                f"{run.name}: longer than {common.timeout_s:.0f} s; PENSTOCK_BENCH_RUN_TIMEOUT_S allows more"
            )
        for row in tail.read():
            if (row["step"] + 1) % every == 0:
                say(f"learning: {run.name}: step {row['step'] + 1} of {common.steps}, reward {row['reward']:.2f}")
        time.sleep(POLL_S)  # nothing else waits in this process: runs are carried out one after the other


def _write(file: Path, what: dict[str, Any]) -> None:
    """Whole or not at all."""
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(what))
    temporary.replace(file)


GOAL = 0.9
WINDOW = 3
"""Steps over which a reward is averaged before it counts as reached: one lucky batch is not learning."""
LAST = 5
"""Steps at the end whose mean is what a run ends with."""
CORRECTED = "truncated_is"
Curves = Mapping[LearningRun, Curve]


def smoothed(rewards: Sequence[float]) -> list[float]:
    """Trailing means over `WINDOW` steps, fewer at the start."""
    return [mean(rewards[max(0, end - WINDOW) : end]) for end in range(1, len(rewards) + 1)]


def wall_to(curve: Curve, goal: float = GOAL) -> float | None:
    """Seconds until the smoothed reward first was `goal`, at full windows; None where it never was."""
    rewards = smoothed(curve.reward)
    return next(
        (wall for wall, one in list(zip(curve.wall_s, rewards, strict=True))[WINDOW - 1 :] if one >= goal), None
    )


def _steps_per_s(curve: Curve) -> float:
    return len(curve.wall_s) / curve.wall_s[-1]


def reward_at_end(curve: Curve) -> float:
    return mean(curve.reward[-LAST:])


def figures_of(curves: Curves) -> dict[str, dict[str, Any]]:
    """``staleness_4`` → correction → figures over its seeds."""
    found: dict[str, dict[str, Any]] = {}
    cells = sorted({(run.staleness, run.correction) for run in curves}, key=lambda cell: (cell[0], cell[1] == NONE))
    for staleness, correction in cells:
        own = [curve for run, curve in curves.items() if (run.staleness, run.correction) == (staleness, correction)]
        found.setdefault(f"staleness_{staleness}", {})[correction] = _cell(own)
    return found


def _cell(curves: Sequence[Curve]) -> dict[str, Any]:
    ends = [reward_at_end(curve) for curve in curves]
    reached = [wall for wall in map(wall_to, curves) if wall is not None]
    return {
        "seeds": len(curves),
        "reward_at_end": round(mean(ends), 4),
        "reward_at_end_deviation": round(stdev(ends), 4) if len(ends) > 1 else None,
        "reward_at_end_least": round(min(ends), 4),
        "seeds_that_reached_0.9": len(reached),
        "wall_to_0.9_s": round(median(reached), 1) if reached else None,
        "wall_s": round(median(curve.wall_s[-1] for curve in curves), 1),
        "waited_share": round(mean(sum(curve.waited_s) / curve.wall_s[-1] for curve in curves), 3),
        "staleness_mean": round(mean(mean(curve.staleness) for curve in curves), 3),
    }


def ratios_of(curves: Curves) -> dict[str, float | None]:
    """Medians over the seeds that both sides have; None where there is none, or one side never reached the goal."""
    return {
        "async_over_sync_steps_per_s": _over(curves, (2, CORRECTED), _steps_per_s),
        "async_over_sync_wall_to_0.9": _over(curves, (2, CORRECTED), wall_to),
        "one_step_off_over_sync_wall_to_0.9": _over(curves, (1, CORRECTED), wall_to),
        "corrected4_over_sync_reward": _over(curves, (4, CORRECTED), reward_at_end),
        "uncorrected4_over_sync_reward": _over(curves, (4, NONE), reward_at_end),
    }


def _over(curves: Curves, cell: tuple[int, str], of: Any) -> float | None:
    ratios = []
    for run, curve in curves.items():
        sync = curves.get(LearningRun(0, CORRECTED, run.seed))
        if (run.staleness, run.correction) == cell and sync is not None:
            mine, base = of(curve), of(sync)
            if mine is None or base is None:
                return None
            ratios.append(mine / base)
    return round(median(ratios), 3) if ratios else None
