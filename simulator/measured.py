"""A setup from a run: what it measured, the rates that follow, and what a change of its settings would do.

Three rates are solved for, under which the simulated run has the measured step time, training time and time of calls.
A changed setup keeps them. Intervals: the bootstrap (Efron 1979), whose draws are the run's steps with replacement.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydantic import Field

from penstock.simulator.config import LogNormal, Rollout, Section, Simulation, Trainer, Weights, Work
from penstock.simulator.load import BadSetup, changed
from penstock.simulator.pipeline import simulate
from penstock.simulator.result import Result

SKIPPED = 4
"""First steps of a run: engines warm up, the pipeline fills."""
ROUNDS = 12
DRAWS = 12
"""The smallest and the largest of 12 draws estimate the quantiles 1/24 and 23/24 (Hazen 1914): a 92 % interval."""
ADMISSION_S = 0.1
"""An agent worker that was refused looks again after 0.05 to 0.2 s (agent_loops/worker.py, BACK_OFF_S)."""


class MeasuredRun(Section):
    """Settings of a run, and means over its counted steps."""

    name: str
    max_staleness: int
    group_size: int
    groups_per_step: int
    workers: int
    concurrency: int
    servers: int = 1
    ranks: int = 1
    longest: int | None = Field(None, description="Most tokens of an episode's response.")
    cores: int = Field(description="Of the machine; 0: each role has its own devices.")
    load: float = Field(
        0.0, description="Mean load average: processes that wanted a core, the run's own too; 0: nothing but the run."
    )
    steps: int = Field(description="Steps counted.")
    wall_s: float = Field(description="Per step; so are the next two.")
    train_s: float = Field(description="The trainer's own time.")
    publish_s: float = Field(description="Until a version is announced.")
    call_s: float = Field(description="An episode's model calls together.")
    tool_s: float = Field(description="One tool call.")
    turns: float
    sampled_tokens: float = Field(description="Of an episode.")
    spread: float = Field(0.0, description="Standard deviation of the logarithm of lengths.")
    prompt_tokens: float
    observation_tokens: float


class Rates(Section):
    """Seconds of a core that is idle otherwise, or of a device."""

    start_s: float = Field(description="Per episode: its box, and the worker's own work for it.")
    token_s: float = Field(description="Per decoded token.")
    trained_token_s: float = Field(description="Per trained token.")


def read_steps(run_dir: Path) -> list[dict[str, Any]]:
    """Return the metrics of the counted steps. Raises `BadSetup` if the folder has no more than `SKIPPED`."""
    try:
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    except OSError as error:
        raise BadSetup(f"{run_dir}: no run with steps is there: {error.strerror}") from None
    if len(rows) <= SKIPPED + 1:
        raise BadSetup(f"{run_dir}: {len(rows)} steps; the first {SKIPPED} are not counted, and two more are needed")
    return rows[SKIPPED:]


def measured(run_dir: Path, rows: Sequence[Mapping[str, Any]], cores: int, load: float = 0.0) -> MeasuredRun:
    """Return the means of `rows`, steps of the run in this folder."""
    config = yaml.safe_load((run_dir / "config.yaml").read_text())

    def mean(key: str, default: float = 0.0) -> float:
        return float(sum(row.get(key, default) for row in rows) / len(rows))

    turns, sampled, response = mean("num_turns_mean"), mean("sampled_length_mean"), mean("response_length_mean")
    tokens = sum(row["tokens"] / row["episodes"] for row in rows) / len(rows)
    middle, long = mean("length_decile/5"), mean("length_decile/9")
    calls = max(turns - 1, 1e-9)
    keys = {key for row in rows for key in row if key.startswith("episode/tool/") and key.endswith("_s")}
    tools_s = sum(map(mean, keys))
    return MeasuredRun(
        name=config["name"],
        max_staleness=config["max_staleness"],
        group_size=config["group_size"],
        groups_per_step=config["groups_per_step"],
        workers=config["agent"]["workers"],
        concurrency=config["agent"]["concurrency"],
        servers=config.get("rollout", {}).get("servers", 1),
        ranks=config.get("trainer", {}).get("ranks", 1),
        longest=config["agent"].get("max_response_tokens"),
        cores=cores,
        load=load,
        steps=len(rows),
        wall_s=mean("wall_s"),
        train_s=mean("train_s"),
        publish_s=mean("publish_s"),
        call_s=mean("episode/llm_latency_s"),
        tool_s=tools_s / calls if turns > 1 else 0.0,
        turns=turns,
        sampled_tokens=sampled,
        spread=math.log(long / middle) / 1.2816 if long > middle > 0 else 0.0,  # the standard normal's 0.9-quantile
        prompt_tokens=tokens - response,
        observation_tokens=(response - sampled) / calls,
    )


def simulation(run: MeasuredRun, rates: Rates, background: float = 0.0) -> Simulation:
    """Return the run's setup. Roles of a machine without devices share its cores, with `background` processes of
    others. In each worker as many boxes start at a time as there are cores, at least two (sandbox/limited.py)."""
    lengths = LogNormal(median=run.sampled_tokens / math.exp(run.spread**2 / 2), sigma=run.spread, longest=run.longest)
    return Simulation(
        max_staleness=run.max_staleness,
        group_size=run.group_size,
        groups_per_step=run.groups_per_step,
        work=Work(
            prompt_tokens=run.prompt_tokens,
            response=lengths,
            turns=max(1.0, run.turns),
            tool_s=LogNormal(median=run.tool_s, sigma=0),
            observation_tokens=run.observation_tokens,
        ),
        rollout=Rollout(
            servers=run.servers,
            token_s=rates.token_s,
            in_flight=run.workers * run.concurrency,
            start_s=rates.start_s,
            starts_at_once=run.workers * max(2, run.cores),
        ),
        trainer=Trainer(ranks=run.ranks, tokens_per_s=1 / rates.trained_token_s),
        weights=Weights(sync_s=run.publish_s + ADMISSION_S),
        cores=run.cores,
        background=background,
        steps=24,
        warmup=6,
    )


def calibrate(run: MeasuredRun) -> Rates:
    """Return the rates under which the simulated run has the measured step time, training time and time of calls.

    Each rate moves its own figure most, so each is scaled by measured over simulated until all three agree.
    """
    rates = Rates(start_s=run.wall_s / (run.group_size * run.groups_per_step), token_s=1e-3, trained_token_s=1e-4)
    background = 0.0
    for _ in range(ROUNDS):
        result = simulate(simulation(run, rates, background))
        background = others(run, result)
        rates = Rates(
            start_s=rates.start_s * run.wall_s / result.step_s,
            token_s=rates.token_s * run.call_s / result.calling_s,
            trained_token_s=rates.trained_token_s * run.train_s / result.train_s,
        )
    return rates


def others(run: MeasuredRun, result: Result) -> float:
    """Return how many processes of others wanted a core, by the measured load."""
    return max(0.0, run.load - result.cores_wanted)


@dataclass(frozen=True, slots=True)
class Prediction:
    """The simulated run with changed settings."""

    run: MeasuredRun
    config: Simulation
    """The changed setup, calibrated on all counted steps."""
    result: Result
    step_s: tuple[float, float]
    """The interval of the step time."""
    over_run: tuple[float, float]
    """The interval of the changed step time over the unchanged simulated one."""


def predict_change(run_dir: Path, overrides: Sequence[str], cores: int) -> Prediction:
    """Simulate the run in `run_dir` with changed keys of its setup. Raises `BadSetup`, `StuckSimulation`.

    `cores`: those of the machine that all roles share; 0 where they have devices of their own.
    """
    rows = read_steps(run_dir)
    run = measured(run_dir, rows, cores)
    config = changed(simulation(run, calibrate(run)), overrides)
    random, pairs = np.random.default_rng(0), list[tuple[float, float]]()
    for seed in range(1, DRAWS + 1):
        drawn = measured(run_dir, [rows[index] for index in random.integers(0, len(rows), len(rows))], cores)
        before = simulation(drawn, calibrate(drawn)).model_copy(update={"seed": seed})
        pairs.append((simulate(changed(before, overrides)).step_s, simulate(before).step_s))
    steps, ratios = [after for after, _ in pairs], [after / before for after, before in pairs]
    return Prediction(run, config, simulate(config), (min(steps), max(steps)), (min(ratios), max(ratios)))
