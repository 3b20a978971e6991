"""Runs of this project on this machine: calibrate on one, predict another, compare.

A record holds what a run left in ``metrics.jsonl`` (means over its steps after the first few) and how busy the machine
was. Three rates are solved for on the calibration run: CPU seconds per episode start, per decoded token and per trained
token; another run then differs in its stated settings and in the machine's load alone.

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

from penstock.simulator.config import LogNormal, Rollout, Section, Simulation, Trainer, Weights, Work
from penstock.simulator.pipeline import simulate
from penstock.simulator.result import Result

FILE = Path(__file__).parent / "cases" / "local.json"
SKIPPED = 4
"""First steps of a run: engines warm up, the pipeline fills."""
ROUNDS = 12
COMPARABLE = 0.25
"""Two runs of a pair whose loads differ by more saw different company: their prediction is listed and not counted."""
ADMISSION_S = 0.1
"""An agent worker that was refused looks again after 0.05 to 0.2 s (agent_loops/worker.py, BACK_OFF_S)."""


class Record(Section):
    """One run."""

    name: str
    max_staleness: int
    group_size: int
    groups_per_step: int
    workers: int
    concurrency: int
    cores: int = Field(description="Of the machine.")
    load: float = Field(
        description="Mean load average: processes that wanted a core, the run's own too; 0: nothing but the run."
    )
    steps: int = Field(description="Steps counted.")
    wall_s: float = Field(description="Per step; so are the next two.")
    train_s: float = Field(description="The trainer's own time.")
    publish_s: float = Field(description="Until a version is announced.")
    call_s: float = Field(description="An episode's model calls together.")
    tool_s: float = Field(description="One tool call.")
    turns: float
    sampled_tokens: float = Field(description="Of an episode.")
    prompt_tokens: float
    observation_tokens: float


class Pair(Section):
    """Two runs, one right after the other."""

    calibrated_on: str
    predicted: str


class LocalCase(Section):
    machine: str
    recorded: str = Field(description="Date, and what else ran.")
    pairs: list[Pair]
    runs: list[Record]

    def run(self, name: str) -> Record:
        return next(record for record in self.runs if record.name == name)


def local_case(path: Path = FILE) -> LocalCase:
    return LocalCase.model_validate(json.loads(path.read_text()))


def record(run_dir: Path, load: float, cores: int) -> Record:
    """Read a finished run. Raises `OSError`, `KeyError` if the folder is not a run."""
    import yaml

    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()][SKIPPED:]
    if not rows:
        raise ValueError(f"{run_dir}: no more than {SKIPPED} steps; the first ones are not counted")

    def mean(key: str, default: float = 0.0) -> float:
        return float(sum(row.get(key, default) for row in rows) / len(rows))

    turns, sampled, response = mean("num_turns_mean"), mean("sampled_length_mean"), mean("response_length_mean")
    tokens = sum(row["tokens"] / row["episodes"] for row in rows) / len(rows)
    return Record(
        name=config["name"],
        max_staleness=config["max_staleness"],
        group_size=config["group_size"],
        groups_per_step=config["groups_per_step"],
        workers=config["agent"]["workers"],
        concurrency=config["agent"]["concurrency"],
        cores=cores,
        load=load,
        steps=len(rows),
        wall_s=mean("wall_s"),
        train_s=mean("train_s"),
        publish_s=mean("publish_s"),
        call_s=mean("episode/llm_latency_s"),
        tool_s=mean("episode/tool/python_s"),
        turns=turns,
        sampled_tokens=sampled,
        prompt_tokens=tokens - response,
        observation_tokens=(response - sampled) / max(turns - 1, 1e-9),
    )


class Rates(Section):
    """CPU seconds on an idle core."""

    start_s: float = Field(description="Per episode: its box, and the worker's own work for it.")
    token_s: float = Field(description="Per decoded token.")
    trained_token_s: float = Field(description="Per trained token.")


def simulation(run: Record, rates: Rates, background: float) -> Simulation:
    """All roles share the machine's cores, with `background` processes of others. In each worker as many boxes start
    at a time as there are cores, at least two (sandbox/limited.py)."""
    return Simulation(
        max_staleness=run.max_staleness,
        group_size=run.group_size,
        groups_per_step=run.groups_per_step,
        work=Work(
            prompt_tokens=run.prompt_tokens,
            response=LogNormal(median=run.sampled_tokens, sigma=0),
            turns=run.turns,
            tool_s=LogNormal(median=run.tool_s),
            observation_tokens=run.observation_tokens,
        ),
        rollout=Rollout(
            token_s=rates.token_s,
            in_flight=run.workers * run.concurrency,
            start_s=rates.start_s,
            starts_at_once=run.workers * max(2, run.cores),
        ),
        trainer=Trainer(tokens_per_s=1 / rates.trained_token_s),
        weights=Weights(sync_s=run.publish_s + ADMISSION_S),
        cores=run.cores,
        background=background,
        steps=24,
        warmup=6,
    )


def calibrate(run: Record) -> Rates:
    """Rates under which the simulated run has the record's step time, training time and time of calls.

    Each rate moves its own figure most, so each is scaled by measured over simulated until all three agree.
    """
    rates = Rates(start_s=run.wall_s / (run.group_size * run.groups_per_step), token_s=1e-3, trained_token_s=1e-4)
    background = 0.0
    for _ in range(ROUNDS):
        result = simulate(simulation(run, rates, background))
        background = _others(run, result)
        rates = Rates(
            start_s=rates.start_s * run.wall_s / result.step_s,
            token_s=rates.token_s * run.call_s / result.calling_s,
            trained_token_s=rates.trained_token_s * run.train_s / result.train_s,
        )
    return rates


def predicted(run: Record, rates: Rates) -> Simulation:
    """The run's settings under the machine's load, of which the simulated processes are a part."""
    background = 0.0
    for _ in range(ROUNDS // 2):
        background = _others(run, simulate(simulation(run, rates, background)))
    return simulation(run, rates, background)


def _others(run: Record, result: Result) -> float:
    return max(0.0, run.load - result.cores_wanted)


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
        runs.append(record(Path(folder), float(load), os.cpu_count() or 1))
    pairs = [Pair(calibrated_on=a.name, predicted=b.name) for a, b in zip(runs[::2], runs[1::2], strict=True)]
    return LocalCase(machine=machine, recorded=company, pairs=pairs, runs=runs)


if __name__ == "__main__":
    measured = recorded(sys.argv[1:], f"{os.cpu_count()} CPU cores", "")
    print(json.dumps(measured.model_dump(mode="json"), indent=2))
