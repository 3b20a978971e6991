"""Compares `penstock run` with TRL's GRPOTrainer: CPU seconds and wall time from the start to a goal.

    penstock bench compare --json
    penstock bench compare --model smollm2-135m --json

fully_async         `penstock run recipes/calculator.yaml`, without evaluation and checkpoints on the way
trl                 TRL's GRPOTrainer with its `tools=` and `transformers.generate`; each call of the tool makes a
                    bubblewrap box for one Python
trl_in_process      the same; the tool computes in its process

With a model, it learns the sums of recipes/smollm2/sums.py, which have no tool, so there is no third side. TRL's one
process then has a thread for each core; ours have one each.

One model, one set of rows, one schedule: groups, group size, each step's learning rate, optimizer, sampling, turns and
limits are read from the recipe for all; both prompts are the same ids, and what the programs log must agree. A program
has reached its goal when the mean reward of three steps in a row is 0.9, that of the sums 0.8. The clock starts with
the process.

Each seed has its round, in which every side runs once, in changing order; one unmeasured step of each program comes
before. All else about the machine should be quiet.

Environment: PENSTOCK_BENCH_MODEL (none; a folder, or a name of `penstock model fetch`), PENSTOCK_BENCH_SEEDS
(0,1,2,3,4), PENSTOCK_BENCH_SIDES (all), PENSTOCK_BENCH_STEPS (50, at most), PENSTOCK_BENCH_TRL (.venv-trl, from
`scripts/setup-trl`; empty leaves TRL out), PENSTOCK_BENCH_RUN_TIMEOUT_S (900; with a model 3600),
PENSTOCK_BENCH_OVERRIDES (of our runs, separated by spaces).
"""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.support.compare_figures import FULLY_ASYNC, TRL, TRL_IN_PROCESS, figures_of, ratios_of
from benchmarks.support.compare_run import Progress
from benchmarks.support.compare_sides import (
    CALCULATOR,
    CompareSide,
    CompareTask,
    PenstockSide,
    TrlProgram,
    check_schedule,
    plan_of,
    sums,
)
from benchmarks.support.comparison import in_turn, say
from benchmarks.support.measure import processor
from benchmarks.support.trl_place import FOLDER, trl_version

SIDES = (FULLY_ASYNC, TRL, TRL_IN_PROCESS)


class UnknownSide(Exception):
    """PENSTOCK_BENCH_SIDES names what there is not."""


@dataclass(frozen=True)
class CompareExtent:
    """The extent of the measurement, read from the environment."""

    model: str
    seeds: tuple[int, ...]
    sides: tuple[str, ...]
    steps: int
    trl: str
    timeout_s: float
    overrides: tuple[str, ...]

    @classmethod
    def read(cls) -> CompareExtent:
        """Raises `UnknownSide`."""
        model = _read("MODEL", "")
        known = SIDES[:2] if model else SIDES
        sides = tuple(_read("SIDES", ",".join(known)).split(","))
        if unknown := set(sides) - set(known):
            raise UnknownSide(f"PENSTOCK_BENCH_SIDES: no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        return cls(
            model=model,
            seeds=tuple(int(one) for one in _read("SEEDS", "0,1,2,3,4").split(",")),
            sides=sides,
            steps=int(_read("STEPS", "50")),
            trl=_read("TRL", str(FOLDER)),
            timeout_s=float(_read("RUN_TIMEOUT_S", "3600" if model else "900")),
            overrides=tuple(shlex.split(_read("OVERRIDES", ""))),
        )

    @property
    def task(self) -> CompareTask:
        return sums(self.model) if self.model else CALCULATOR

    def programs(self) -> list[CompareSide]:
        """Those of TRL only where it is."""
        there = trl_version(self.trl) is not None
        made: dict[str, CompareSide] = {
            FULLY_ASYNC: PenstockSide(FULLY_ASYNC, self.task, self.steps, self.timeout_s, self.overrides)
        }
        for name in (TRL, TRL_IN_PROCESS) if there else ():
            made[name] = TrlProgram(name, self.task, self.trl, name == TRL, self.steps, self.timeout_s)
        return [made[name] for name in self.sides if name in made]


def measure() -> dict[str, Any]:
    extent = CompareExtent.read()
    sides = extent.programs()
    say(f"compare: {', '.join(side.name for side in sides) or 'no side is here'}; seeds {extent.seeds}")
    runs: dict[str, dict[int, Progress]] = {side.name: {} for side in sides}
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        config, _ = extent.task.config(extent.overrides, 0, extent.steps, Path(folder))
        plan = plan_of(config, Path(folder), extent.task.goal)
        _warm_up(sides, Path(folder))
        for number, seed in enumerate(extent.seeds):
            for side in in_turn(sides, number) if sides else ():
                run = _carry_out(side, seed, Path(folder) / f"{side.name}-{seed}")
                check_schedule(side.name, seed, run, plan)
                runs[side.name][seed] = run
    setup = {**asdict(extent), **processor(), "recipe": extent.task.recipe.name, "plan": asdict(plan) | {"rows": None}}
    setup |= {"trl": trl_version(extent.trl) or f"not in {extent.trl or 'an empty name'}: scripts/setup-trl"}
    setup |= {package: version(package) for package in ("torch", "transformers")}
    return {"bench": "compare", "ratio": ratios_of(runs), "figures": figures_of(runs), "setup": setup}


def _warm_up(sides: Sequence[CompareSide], folder: Path) -> None:
    """One step of each program, unmeasured: what is compiled and read from the disk once is there for all."""
    kinds = {type(side): side for side in sides}
    for side in kinds.values():
        say(f"compare: one unmeasured step of {side.name}")
        _fresh(replace(side, steps=1), 0, folder / "warm-up")


def _carry_out(side: CompareSide, seed: int, folder: Path) -> Progress:
    run = _fresh(side, seed, folder)
    result = "reached the goal" if run.reached else "did not reach the goal"
    say(
        f"compare: seed {seed}, {side.name} {result}: {len(run.steps)} steps in {run.wall_s:.1f} s, "
        f"{run.cpu_s:.1f} CPU s, load {os.getloadavg()[0]:.1f}"
    )
    return run


def _fresh(side: CompareSide, seed: int, folder: Path) -> Progress:
    folder.mkdir()
    try:
        return side.run(seed, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _read(name: str, default: str) -> str:
    return os.environ.get(f"PENSTOCK_BENCH_{name}", default)
