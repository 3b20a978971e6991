"""A run of ours beside TRL's GRPOTrainer, from start to a mean reward of 0.9: CPU seconds and wall time.

    penstock bench compare --json

fully_async         `penstock run recipes/calculator.yaml`, without evaluation and checkpoints on the way
trl_in_process      TRL's GRPOTrainer with its `tools=` and `transformers.generate`; the tool computes in its process
trl_bwrap           the same; each call of the tool makes a bubblewrap box for one Python

One model, one set of rows, one schedule: groups, group size, each step's learning rate, optimizer, sampling, turns and
limits are read from the recipe for all; both prompts are the same ids, and what the programs log must agree. A program
has reached its goal when the mean reward of three steps in a row is 0.9. The clock starts with the process.

Each seed has its round, in which every side runs once, in changing order; one unmeasured step of each program comes
before. All else about the machine should be quiet.

Environment: PENSTOCK_BENCH_SEEDS (0,1,2,3,4), PENSTOCK_BENCH_SIDES (all three), PENSTOCK_BENCH_STEPS (50, at most),
PENSTOCK_BENCH_TRL (.venv-trl, from `scripts/setup-trl`; empty leaves TRL out), PENSTOCK_BENCH_RUN_TIMEOUT_S (900),
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

from benchmarks.support.compare_figures import FULLY_ASYNC, TRL_BWRAP, TRL_IN_PROCESS, figures_of, ratios_of
from benchmarks.support.compare_run import Progress
from benchmarks.support.compare_sides import (
    RECIPE,
    CompareSide,
    PenstockSide,
    TrlProgram,
    check_schedule,
    penstock_config,
    plan_of,
)
from benchmarks.support.comparison import in_turn, say
from benchmarks.support.measure import processor
from benchmarks.support.trl_place import TRL, trl_version

SIDES = (FULLY_ASYNC, TRL_IN_PROCESS, TRL_BWRAP)


class UnknownSide(Exception):
    """PENSTOCK_BENCH_SIDES names what there is not."""


@dataclass(frozen=True)
class CompareExtent:
    """How much is measured, from the environment."""

    seeds: tuple[int, ...]
    sides: tuple[str, ...]
    steps: int
    trl: str
    timeout_s: float
    overrides: tuple[str, ...]

    @classmethod
    def read(cls) -> CompareExtent:
        """Raises `UnknownSide`."""
        sides = tuple(_read("SIDES", ",".join(SIDES)).split(","))
        if unknown := set(sides) - set(SIDES):
            raise UnknownSide(f"PENSTOCK_BENCH_SIDES: no {', '.join(sorted(unknown))}; there are {', '.join(SIDES)}")
        return cls(
            seeds=tuple(int(one) for one in _read("SEEDS", "0,1,2,3,4").split(",")),
            sides=sides,
            steps=int(_read("STEPS", "50")),
            trl=_read("TRL", str(TRL)),
            timeout_s=float(_read("RUN_TIMEOUT_S", "900")),
            overrides=tuple(shlex.split(_read("OVERRIDES", ""))),
        )

    def programs(self) -> list[CompareSide]:
        """Those of TRL only where it is."""
        there = trl_version(self.trl) is not None
        made: dict[str, CompareSide] = {
            FULLY_ASYNC: PenstockSide(FULLY_ASYNC, self.steps, self.timeout_s, self.overrides)
        }
        for name in (TRL_IN_PROCESS, TRL_BWRAP) if there else ():
            made[name] = TrlProgram(name, self.trl, name == TRL_BWRAP, self.steps, self.timeout_s)
        return [made[name] for name in self.sides if name in made]


def measure() -> dict[str, Any]:
    extent = CompareExtent.read()
    sides = extent.programs()
    say(f"compare: {', '.join(side.name for side in sides) or 'no side is here'}; seeds {extent.seeds}")
    runs: dict[str, dict[int, Progress]] = {side.name: {} for side in sides}
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        plan = plan_of(penstock_config(extent.overrides, 0, extent.steps, Path(folder))[0], Path(folder))
        _warm_up(sides, Path(folder))
        for number, seed in enumerate(extent.seeds):
            for side in in_turn(sides, number) if sides else ():
                run = _carry_out(side, seed, Path(folder) / f"{side.name}-{seed}")
                check_schedule(side.name, seed, run, plan)
                runs[side.name][seed] = run
    setup = {**asdict(extent), **processor(), "recipe": RECIPE.name, "plan": asdict(plan) | {"rows": None}}
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
