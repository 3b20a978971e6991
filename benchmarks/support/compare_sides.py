"""The programs of `penstock bench compare`: runs of ours, and TRL's, on one schedule and the same rows."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.boxes import bare_bwrap
from benchmarks.support.child import ROOT
from benchmarks.support.compare_run import Program, Progress, follow
from benchmarks.support.grpo_plan import GOAL, WINDOW, GrpoPlan, GrpoStep, TrlJob
from benchmarks.support.trl_place import trl_environment
from penstock.agent_loops.chat import chat_of
from penstock.datasets import materialise, parquet_rows
from penstock.deploy import RunConfig, RunDir, load_config
from penstock.testing import FakeSandbox
from penstock.tools import PythonTool
from penstock.trainer import learning_rate

RECIPE = ROOT / "recipes" / "calculator.yaml"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
TOOL_TIMEOUT_S = 60.0


class OtherSchedule(Exception):
    """Two programs did not train alike: learning rates or episodes per step differ from the plan's."""


def penstock_config(overrides: Sequence[str], seed: int, steps: int, folder: Path) -> tuple[RunConfig, list[str]]:
    """The recipe without evaluation and checkpoints on the way, as TRL's program; it ends at the goal."""
    words = [
        "name=compare",
        f"runs_dir={folder}",
        f"seed={seed}",
        "data.eval=null",
        f"trainer.steps={steps}",
        f"trainer.checkpoint_every={steps}",
        "trainer.stop.metric=reward",
        f"trainer.stop.target={GOAL}",
        f"trainer.stop.window={WINDOW}",
        *overrides,
    ]
    return load_config(RECIPE, words), words


def plan_of(config: RunConfig, rows: Path) -> GrpoPlan:
    """The schedule of a run of ours, for the program that shall follow it."""
    trainer, agent = config.trainer, config.agent
    return GrpoPlan(
        model=config.model,
        seed=config.seed,
        rows=str(rows),
        groups=config.groups_per_step,
        group_size=config.group_size,
        learning_rates=tuple(learning_rate(trainer, step) for step in range(trainer.steps)),
        betas=trainer.betas,
        eps=trainer.eps,
        weight_decay=trainer.weight_decay,
        max_grad_norm=trainer.max_grad_norm,
        clip_low=trainer.loss_options.get("clip_low", CLIP_LOW),
        clip_high=trainer.loss_options.get("clip_high", CLIP_HIGH),
        temperature=agent.temperature,
        top_p=agent.top_p,
        top_k=max(0, agent.top_k),
        max_turns=agent.max_turns,
        max_new_tokens=agent.max_new_tokens,
        max_response_tokens=agent.max_response_tokens,
    )


CLIP_LOW, CLIP_HIGH = 0.2, 0.28
"""Defaults of `trainer.losses.decoupled_ppo`."""


@dataclass(frozen=True)
class PenstockSide:
    """`penstock run`."""

    name: str
    steps: int
    """At most"""
    timeout_s: float
    overrides: tuple[str, ...] = ()

    def run(self, seed: int, folder: Path) -> Progress:
        """`folder`: empty, this run's own. Raises `ProgramFailed`."""
        config, words = penstock_config(["max_staleness=fully_async", *self.overrides], seed, self.steps, folder)
        command = [sys.executable, "-m", "penstock.deploy.cli", "run", str(RECIPE), *words]
        path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        log, output = RunDir.of(config).metrics, folder / "output.log"
        return follow(Program(command, {"PYTHONPATH": path}, log, _our_step, output), self.timeout_s)


def _our_step(row: Mapping[str, Any], wall_s: float) -> GrpoStep:
    sampled = round(row["sampled_length_mean"] * row["episodes"])
    return GrpoStep(wall_s, row["reward"], row["episodes"], sampled, row["lr"])


@dataclass(frozen=True)
class TrlProgram:
    """`support.trl_grpo`, with one of its tools."""

    name: str
    trl: str
    """Folder of `scripts/setup-trl`"""
    boxed: bool
    """A bwrap for each call; else the tool computes in the trainer's process"""
    steps: int
    """At most"""
    timeout_s: float

    def run(self, seed: int, folder: Path) -> Progress:
        """`folder`: empty, this run's own. Raises `ProgramFailed`."""
        job = self.job(seed, folder)
        command = [sys.executable, "-m", "benchmarks.support.trl_grpo", job.dump()]
        environment = {**trl_environment(self.trl), **ONE_THREAD, "HF_HUB_OFFLINE": "1"}
        program = Program(command, environment, Path(job.log), _trl_step, folder / "output.log")
        return follow(program, self.timeout_s)

    def job(self, seed: int, folder: Path) -> TrlJob:
        config, _ = penstock_config([], seed, self.steps, folder)
        rows, plan = folder / "rows.jsonl", plan_of(config, folder / "rows.jsonl")
        write_rows(config, rows)
        return TrlJob(
            plan=plan,
            tool=tool_schema(),
            command=(*bare_bwrap(), "python3", "-I", "-S", "-c") if self.boxed else None,
            tool_timeout_s=TOOL_TIMEOUT_S,
            micro_rows=plan.episodes,
            log=str(folder / "steps.jsonl"),
        )


def _trl_step(row: Mapping[str, Any], wall_s: float) -> GrpoStep:
    return GrpoStep(wall_s, row["reward"], row["episodes"], row["sampled_tokens"], row["lr"])


def check_schedule(name: str, seed: int, progress: Progress, plan: GrpoPlan) -> None:
    """Raises `OtherSchedule`."""
    for number, step in enumerate(progress.steps):
        wanted = plan.learning_rates[number]
        if step.episodes != plan.episodes or not math.isclose(step.lr, wanted, rel_tol=1e-6):
            raise OtherSchedule(
                f"{name}, seed {seed}, step {number}: {step.episodes} episodes at learning rate {step.lr}; "
                f"the recipe has {plan.episodes} at {wanted}"
            )


CompareSide = PenstockSide | TrlProgram


def tool_schema() -> dict[str, Any]:
    """As the prompt of a run shows it."""
    return dict(PythonTool(FakeSandbox()).schema)


def write_rows(config: RunConfig, path: Path) -> None:
    """The recipe's training data, each prompt with the ids that our model reads."""
    chat, tools = chat_of(config.model, config.agent), [tool_schema()]
    lines = []
    for row in parquet_rows(Path(materialise(config.data.train, path.parent))):
        line = {
            "prompt": row["prompt"],
            "prompt_ids": list(chat.prompt_ids(row["prompt"], tools)),
            "ground_truth": row["reward_model"]["ground_truth"],
            "data_source": row["data_source"],
        }
        lines.append(json.dumps(line))
    path.write_text("\n".join(lines) + "\n")
