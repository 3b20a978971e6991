"""Runs of this project on this machine: calibrate on one, predict another, compare.

The rates of `penstock.simulator.measured` are solved for on the calibration run; another run then differs in its stated
settings and in the machine's load alone.

    python -m benchmarks.simulator.local runs/FIRST:2.5 runs/SECOND:2.0 > benchmarks/simulator/cases/local.json

records pairs of runs, the first of each for calibration; after the colon the mean load average while it ran.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from penstock.simulator import Simulation, simulate
from penstock.simulator.config import Section
from penstock.simulator.measured import ROUNDS, MeasuredRun, Rates, calibrate, measured, others, read_steps, simulation

FILE = Path(__file__).parent / "cases" / "local.json"
COMPARABLE = 0.25
"""Two runs of a pair whose loads differ by more saw different company: their prediction is listed and not counted."""


class Pair(Section):
    """Two runs, one right after the other."""

    calibrated_on: str
    predicted: str


class LocalCase(Section):
    machine: str
    recorded: str = Field(description="Date, and what else ran.")
    pairs: list[Pair]
    runs: list[MeasuredRun]

    def run(self, name: str) -> MeasuredRun:
        return next(one for one in self.runs if one.name == name)


def local_case(path: Path = FILE) -> LocalCase:
    return LocalCase.model_validate(json.loads(path.read_text()))


def predicted(run: MeasuredRun, rates: Rates) -> Simulation:
    """The run's settings under the machine's load, of which the simulated processes are a part."""
    background = 0.0
    for _ in range(ROUNDS // 2):
        background = others(run, simulate(simulation(run, rates, background)))
    return simulation(run, rates, background)


class LocalPrediction(Section):
    name: str
    measured_s: float
    predicted_s: float
    error: float
    loads: tuple[float, float] = Field(description="Load average in the run of the rates, and in this one.")

    @property
    def counted(self) -> bool:
        return abs(self.loads[1] - self.loads[0]) <= COMPARABLE * max(self.loads)


def predict_local(case: LocalCase) -> list[LocalPrediction]:
    """Predicts the second run of each pair from the rates of the first."""
    predictions = []
    for pair in case.pairs:
        first, second = case.run(pair.calibrated_on), case.run(pair.predicted)
        step_s = simulate(predicted(second, calibrate(first))).step_s
        predictions.append(
            LocalPrediction(
                name=second.name,
                measured_s=second.wall_s,
                predicted_s=step_s,
                error=abs(step_s / second.wall_s - 1),
                loads=(first.load, second.load),
            )
        )
    return predictions


def recorded(arguments: Sequence[str], machine: str, company: str) -> LocalCase:
    """The case of runs given as ``RUN_DIR:LOAD``, two and two. Raises `ValueError` if they are not pairs."""
    if not arguments or len(arguments) % 2:
        raise ValueError("give pairs of RUN_DIR:LOAD, the first of each for calibration")
    runs = []
    for argument in arguments:
        folder, _, load = argument.rpartition(":")
        run_dir = Path(folder)
        runs.append(measured(run_dir, read_steps(run_dir), os.cpu_count() or 1, float(load)))
    pairs = [Pair(calibrated_on=a.name, predicted=b.name) for a, b in zip(runs[::2], runs[1::2], strict=True)]
    return LocalCase(machine=machine, recorded=company, pairs=pairs, runs=runs)


if __name__ == "__main__":
    case = recorded(sys.argv[1:], f"{os.cpu_count()} CPU cores", "")
    print(json.dumps(case.model_dump(mode="json"), indent=2))
