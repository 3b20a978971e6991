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
from benchmarks.support.grpo_plan import WINDOW, GrpoPlan, GrpoStep, TrlJob
from benchmarks.support.trl_place import trl_environment
from penstock.agent_loops.chat import chat_of
from penstock.deploy import RunConfig, RunDir, load_config, rows_of
from penstock.testing import FakeSandbox
from penstock.tools import PythonTool
from penstock.trainer import learning_rate

TOOL_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class CompareTask:
    """The task that all sides learn."""

    recipe: Path
    goal: float
    """Mean reward"""
    overrides: tuple[str, ...] = ()
    trl_threads: int = 1
    """Threads of TRL's one process; each process of Penstock has one"""

    def config(self, overrides: Sequence[str], seed: int, steps: int, folder: Path) -> tuple[RunConfig, list[str]]:
        """The recipe without evaluation and checkpoints on the way, as TRL's program; it ends at the goal."""
        words = [
            "name=compare",
            f"runs_dir={folder}",
            f"seed={seed}",
            "data.eval=null",
            f"trainer.steps={steps}",
            f"trainer.checkpoint_every={steps}",
            "trainer.stop.metric=reward",
            f"trainer.stop.target={self.goal}",
            f"trainer.stop.window={WINDOW}",
            *self.overrides,
            *overrides,
        ]
        return load_config(self.recipe, words), words


CALCULATOR = CompareTask(ROOT / "recipes" / "calculator.yaml", 0.9)


def sums(model: str) -> CompareTask:
    """Returns the task of a pretrained model: sums, one turn, without a tool."""
    recipe = ROOT / "recipes" / "smollm2" / "sums.py"
    return CompareTask(recipe, 0.8, (f"model={model}",), os.cpu_count() or 1)


class OtherSchedule(Exception):
    """Two programs did not train alike: learning rates or episodes per step differ from the plan's."""


def plan_of(config: RunConfig, rows: Path, goal: float) -> GrpoPlan:
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
        goal=goal,
    )


CLIP_LOW, CLIP_HIGH = 0.2, 0.28
"""Defaults of `trainer.losses.decoupled_ppo`."""


@dataclass(frozen=True)
class PenstockSide:
    """`penstock run`."""

    name: str
    task: CompareTask
    steps: int
    """At most"""
    timeout_s: float
    overrides: tuple[str, ...] = ()

    def run(self, seed: int, folder: Path) -> Progress:
        """`folder`: empty, this run's own. Raises `ProgramFailed`."""
        config, words = self.task.config(["max_staleness=fully_async", *self.overrides], seed, self.steps, folder)
        command = [sys.executable, "-m", "penstock.deploy.cli", "run", str(self.task.recipe), *words]
        path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        log, output = RunDir.of(config).metrics, folder / "output.log"
        program = Program(command, {"PYTHONPATH": path}, log, _our_step, output)
        return follow(program, self.timeout_s, self.task.goal)


def _our_step(row: Mapping[str, Any], wall_s: float) -> GrpoStep:
    sampled = round(row["sampled_length_mean"] * row["episodes"])
    return GrpoStep(wall_s, row["reward"], row["episodes"], sampled, row["lr"])


@dataclass(frozen=True)
class TrlProgram:
    """`support.trl_grpo`, with one of its tools."""

    name: str
    task: CompareTask
    trl: str
    """Folder of `scripts/setup-trl`"""
    boxed: bool
    """A bwrap for each call of the tool; else it computes in the trainer's process"""
    steps: int
    """At most"""
    timeout_s: float

    def run(self, seed: int, folder: Path) -> Progress:
        """`folder`: empty, this run's own. Raises `ProgramFailed`."""
        job = self.job(seed, folder)
        command = [sys.executable, "-m", "benchmarks.support.trl_grpo", job.dump()]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(job.threads))
        environment = {**trl_environment(self.trl), **threads, "HF_HUB_OFFLINE": "1"}
        program = Program(command, environment, Path(job.log), _trl_step, folder / "output.log")
        return follow(program, self.timeout_s, self.task.goal)

    def job(self, seed: int, folder: Path) -> TrlJob:
        config, _ = self.task.config([], seed, self.steps, folder)
        rows = folder / "rows.jsonl"
        plan, tools = plan_of(config, rows, self.task.goal), tools_of(config)
        write_rows(config, rows)
        return TrlJob(
            plan=plan,
            reward=config.agent.reward.rpartition(":")[0],
            threads=self.task.trl_threads,
            tool=tools[0] if tools else None,
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


def tools_of(config: RunConfig) -> list[dict[str, Any]]:
    """The schema of the recipe's tool, if it has one, as the prompt of a run shows it."""
    return [dict(PythonTool(FakeSandbox()).schema)] if config.tools else []


def write_rows(config: RunConfig, path: Path) -> None:
    """The recipe's training data, each prompt with the ids that our model reads."""
    chat, tools = chat_of(config.model, config.agent), tools_of(config)
    lines = []
    for row in rows_of(config, "train"):
        line = {
            "prompt": row.messages,
            "prompt_ids": list(chat.prompt_ids(row.messages, tools)),
            "ground_truth": row.ground_truth,
            "data_source": row.data_source,
        }
        lines.append(json.dumps(line))
    path.write_text("\n".join(lines) + "\n")
