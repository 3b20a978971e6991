"""One run of `penstock bench learning`: launched by `penstock run`, kept in a folder, and what it came to."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.support import far_python, uncorrected
from benchmarks.support.child import ROOT
from benchmarks.support.comparison import say
from penstock.deploy import RunDir, RunLock
from penstock.deploy.load_config import load_config
from penstock.trainer import LineTail, last_by_step, read_lines

RECIPE = ROOT / "recipes" / "calculator.yaml"
NONE = "none"
WORKERS = 2
LONGEST_WAITS = 30.0
"""A tool's longest wait, in medians: at sigma 1 one call in three thousand would take longer."""
POLL_S = 1.0
STOP_TIMEOUT_S = 90.0


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

    def digest(self) -> str:
        """Names the folder: runs of other settings are other runs, and neither replaces the other."""
        told = {**asdict(self), "timeout_s": None, "recipe": RECIPE.read_text()}
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:10]


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
        """Of the calculator recipe."""
        longest_s = LONGEST_WAITS * common.tool_median_s
        waits = {"median_s": common.tool_median_s, "sigma": common.tool_sigma, "longest_s": longest_s}
        tool = {"name": far_python.PATH, "timeout_s": longest_s + 10, "settings": waits}
        episodes = common.groups * common.group_size * (self.staleness + 1)
        return [
            f"name={self.name}",
            f"runs_dir={folder}",
            f"seed={self.seed}",
            f"max_staleness={self.staleness}",
            f"group_size={common.group_size}",
            f"groups_per_step={common.groups}",
            f"data.train=generate:calculator/train?train=4096&eval=128&seed={self.seed}",
            "data.eval=null",
            f"tools={json.dumps([tool])}",
            f"agent.workers={WORKERS}",
            # All that admission lets in is under way at once: what is compared is the staleness, not a worker's room.
            f"agent.concurrency={-(-episodes // WORKERS)}",
            f"rollout.engine={common.engine}",
            f"trainer.steps={common.steps}",
            f"trainer.correction={uncorrected.PATH if self.correction == NONE else self.correction}",
            f"trainer.checkpoint_every={common.steps}",
            "trainer.keep_checkpoints=1",
            "trainer.save_trajectories=0",
        ]


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
        )


def finished(run: LearningRun, folder: Path) -> Curve | None:
    """What an earlier call has measured; None where there is nothing whole."""
    file = folder / run.name / "curve.json"
    return Curve(**json.loads(file.read_text())) if file.exists() else None


def carry_out(run: LearningRun, common: Common, folder: Path) -> Curve:
    """From start to end. What is left of an interrupted one goes: its clock did not run on. Raises `RunFailed`."""
    overrides = run.overrides(common, folder)
    place = RunDir.of(load_config(RECIPE, overrides))
    if place.root.exists():
        with RunLock(place, resume=True):  # raises where it is going on
            shutil.rmtree(place.root)
    log = folder / f"{run.name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(_command(overrides), stdout=output, stderr=output, env=_environment(), cwd=ROOT)
        try:
            _follow(process, run, common, place)
        finally:
            _stop(process)
    if process.returncode:
        raise RunFailed(f"{run.name}: exit status {process.returncode}, see {log}\n{log.read_text()[-2000:]}")
    curve = Curve.of(last_by_step(read_lines(place.metrics)))
    if len(curve.wall_s) != common.steps:
        raise RunFailed(f"{run.name}: {len(curve.wall_s)} of {common.steps} steps are in {place.metrics}")
    _write(place.root / "curve.json", asdict(curve))
    return curve


def _command(overrides: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "penstock.deploy.cli", "run", str(RECIPE), *overrides]


def _environment() -> dict[str, str]:
    """Roles import the tool and the correction from this repository."""
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _follow(process: subprocess.Popen[bytes], run: LearningRun, common: Common, place: RunDir) -> None:
    """Say now and then how far it is. Raises `RunFailed` past the deadline."""
    tail, deadline = LineTail(place.metrics), time.monotonic() + common.timeout_s
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


def _stop(process: subprocess.Popen[bytes]) -> None:
    """A run that is told to stop ends what it started; killed, its processes are told by the kernel."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _write(file: Path, what: dict[str, Any]) -> None:
    """Whole or not at all."""
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(what))
    temporary.replace(file)
