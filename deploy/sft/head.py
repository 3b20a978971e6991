"""`penstock sft`: prepares the data, then supervises the process that trains on it.

    lock the run's folder ─► data/ (`prepare`) ─► config.yaml ─► trainer: one rank, or torchrun ─► summary.json
                                                        ▲            │ restarted with back-off when it dies
                                                        └────────────┘ from its newest checkpoint

Tasks: the trainer's process, the reporter (reads metrics.jsonl every half second), and one that waits for Ctrl-C or
SIGTERM. The first that ends, ends the command; the trainer is given time to save a checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from penstock.agent_loops import AgentError
from penstock.common import JsonlTail, last_by, read_jsonl, write_atomically
from penstock.deploy.config import RunConfig, load_config
from penstock.deploy.preflight.data import check_data
from penstock.deploy.preflight.model import check_model_here
from penstock.deploy.preflight.settings import check_training_engine
from penstock.deploy.preflight.stop_grace import with_stop_grace
from penstock.deploy.preflight.suite import refuse_doomed
from penstock.deploy.recipe_tree import ConfigError
from penstock.deploy.run.connection import connect_file
from penstock.deploy.run.console import HeadConsole
from penstock.deploy.run.identity import changed_settings
from penstock.deploy.run.launcher import Interrupted, until_interrupted
from penstock.deploy.run.plan import SUPERVISED, SUPERVISOR_S, rank_environment, trainer_stop_s
from penstock.deploy.run.processes import RoleFailed, RoleProcess, RoleSpec
from penstock.deploy.run_dir import LivesFile, LivesTotal, RunDir, RunLock, require_run
from penstock.deploy.sft.prepared import PreparedData, listed, prepare
from penstock.sandbox import SandboxError
from penstock.tools import ToolConfigError
from penstock.trainer import DataError, steps_of

REFUSALS = (ConfigError, DataError, AgentError, SandboxError, ToolConfigError)
"""The recipe or its data are wrong."""
REPORT_S = 0.5
LINE_S = 2.0
"""Between two lines if standard error is not a terminal."""


def fine_tune_recipe(recipe: Path, overrides: Sequence[str], *, resume: bool) -> int:
    """Returns the exit status: 0 done, 1 training failed, 2 recipe or data are wrong, 130 interrupted."""
    console = HeadConsole()
    try:
        summary = _fine_tune(load_sft_config(recipe, overrides), console, resume=resume)
    except REFUSALS as error:
        return console.complain(str(error), 2)
    except RoleFailed as error:
        return console.complain(str(error), 1)
    except (Interrupted, KeyboardInterrupt, asyncio.CancelledError):
        again = " ".join(["penstock sft", str(recipe), *overrides, "--resume"])
        return console.complain(f"interrupted; continue with: {again}", 130)
    console.print(_results(json.loads(summary.read_text()), summary), markup=False, soft_wrap=True)
    return 0


def _results(summary: Mapping[str, Any], path: Path) -> str:
    """Return how training ended, the losses and where the model is, for a terminal."""
    advice, last = "", summary["loss_last"]
    if last is not None and last > 0.95 * summary["loss_first"]:
        advice = "the loss hardly fell: raise sft.lr (a small model needs about 5e-4) or sft.epochs"
        if summary["steps"] < 10:
            advice = f"the loss hardly fell in {summary['steps']} steps: give more conversations, or raise sft.epochs"
    losses = {"loss": "loss", "validation": "eval_loss"}
    pairs = {subject: (summary[f"{key}_first"], summary[f"{key}_last"]) for subject, key in losses.items()}
    lines = {
        **{subject: f"{first:.4f} -> {last:.4f}" for subject, (first, last) in pairs.items() if last is not None},
        "data": f"{summary['conversations']} conversations, {summary['tokens_trained']:,} tokens of the model's own",
        "advice": advice,
        "left out": listed(summary["left_out"]) if summary["left_out"] else "",
        "model": summary["model"],
        "files": str(path),
    }
    head = f"{summary['name']}: {summary['ended'] or 'ended'}, after {summary['wall_s']:.0f} s"
    return "\n".join([head, *(f"  {subject:11}{line}" for subject, line in lines.items() if line)])


def load_sft_config(recipe: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """A recipe, which may lack `data`. Its name gets the end ``-sft``, unless an override names the run: a recipe's
    fine-tuning and its reinforcement learning have folders of their own. Raises `ConfigError`."""
    config = load_config(recipe, overrides, with_tasks=False)
    if not any(one.startswith("name=") for one in overrides):
        config = config.model_copy(update={"name": f"{config.name}-sft"})
    out = str(Path(config.sft.out).resolve()) if config.sft.out else None
    return config.model_copy(
        update={"runs_dir": str(Path(config.runs_dir).resolve()), "sft": config.sft.model_copy(update={"out": out})}
    )


def _fine_tune(config: RunConfig, console: Console, *, resume: bool) -> Path:
    checks = [check_training_engine(config), check_model_here(config)]
    if config.sft.policy:  # it plays the tasks of data.train
        tasks = config.data.model_copy(update={"eval": None})
        checks.append(check_data(config.model_copy(update={"data": tasks})))
    refuse_doomed(check for check in checks if check is not None)
    _check_out(config, resume=resume)
    run = RunDir.of(config)
    if resume:
        require_run(run)
    is_new = not run.root.exists()
    with RunLock(run, resume=resume):
        run.logs.mkdir(exist_ok=True)
        if not resume:
            shutil.rmtree(run.data, ignore_errors=True)
        if not run.config.exists():
            # First: a folder with this file and no step counts as untrained, whenever it was left.
            run.write_config(config)
        changes = changed_settings(run, config) if resume else []
        if config.sft.policy and not run.data.exists():
            console.print(f"{config.name}: {config.sft.policy} plays the tasks of data.train", markup=False)
        try:
            prepared = prepare(config, run.data, [one for one in changes if not one.startswith("trainer.")])
        except REFUSALS:
            if is_new:
                shutil.rmtree(run.root)
            raise
        if changes:
            console.print(f"{config.name}: its settings have changed ({', '.join(changes)})", markup=False)
        steps = steps_of(config.sft, prepared.conversations)
        trained = 0
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # there is no summary yet
            summary = json.loads(run.summary.read_text(encoding="utf-8"))
            trained = int(summary["steps"]) if Path(summary["model"]).is_dir() else 0
        if resume and trained >= steps:
            console.print(f"{config.name}: nothing is left to do of {steps} steps", markup=False)
            return run.summary
        config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"steps": steps})})
        config = with_stop_grace(config)
        run.write_config(config)
        reporter = SftReporter(config, run, prepared, console)
        with connect_file(None, run):
            total = asyncio.run(_supervise(config, run, reporter))
        return write_sft_summary(config, run, prepared, total)


def _check_out(config: RunConfig, *, resume: bool) -> None:
    """The new model takes the place of what is at `sft.out`. Raises `ConfigError` if that is anything else than the
    model of an earlier life of this run."""
    if config.sft.out is None or not os.path.lexists(config.sft.out):
        return
    out, base = Path(config.sft.out), Path(config.model).resolve()
    if out in (base, *base.parents):
        raise ConfigError(f"sft.out: {out} is or holds the model that training starts from; name another folder")
    if not resume or not (out / "config.json").is_file():
        raise ConfigError(f"sft.out: {out} is there already, and would be replaced; name a folder that is not there")


async def _supervise(config: RunConfig, run: RunDir, reporter: SftReporter) -> LivesTotal:
    """Raises `RoleFailed`, `Interrupted`."""
    trainer, lives = RoleProcess(_trainer(config, run)), LivesFile(run.lives)
    helpers = [
        asyncio.create_task(reporter.run(lambda: lives.write({"trainer": trainer.restarts})), name="reporter"),
        asyncio.create_task(until_interrupted(asyncio.current_task()), name="interrupt"),
    ]
    # Tasks begin in this order: a Ctrl-C that comes with the trainer's start would otherwise be asyncio's own.
    running = asyncio.create_task(trainer.run(), name="trainer")
    try:
        ended, _ = await asyncio.wait({running, *helpers}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        try:
            await trainer.stop()
        finally:  # also after a second Ctrl-C
            for task in helpers:
                task.cancel()
            await asyncio.gather(running, *helpers, return_exceptions=True)
            reporter.close()
            total = lives.total({"trainer": trainer.restarts})
    for task in (running, *ended):  # a trainer that could not save is no orderly stop
        task.result()
    return total


def _trainer(config: RunConfig, run: RunDir) -> RoleSpec:
    trainer = config.trainer
    words = ("sft-rank", str(run.root), "--alone") if trainer.ranks == 1 else ("sft-ranks", str(run.root))
    env = {**os.environ, **SUPERVISED, **rank_environment(trainer)}
    return RoleSpec(
        "trainer",
        [sys.executable, "-m", "penstock.deploy.cli", *words],
        env,
        run.logs / "trainer.log",
        trainer.max_restarts,
        stop_grace_s=trainer_stop_s(trainer) + SUPERVISOR_S,
    )


class SftReporter:
    """A progress bar on a terminal, a line every few seconds elsewhere."""

    def __init__(self, config: RunConfig, run: RunDir, prepared: PreparedData, console: Console) -> None:
        self._steps = config.trainer.steps
        self._metrics, self._evaluations = JsonlTail(run.metrics), JsonlTail(run.evaluations)
        self._reported, self._line_at = -1, 0.0
        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._bar.start()
        self._task = self._bar.add_task("starting", total=self._steps)
        self._say(
            f"{config.name}: {prepared.conversations} conversations, {prepared.tokens} tokens of which "
            f"{prepared.tokens_trained} are trained on, {self._steps} steps of {config.sft.batch}; "
            f"{prepared.validation} for validation; left out: {listed(prepared.left_out)}"
        )
        self._say(f"  folder: {run.root}")

    async def run(self, on_look: Callable[[], None]) -> None:
        """Until cancelled."""
        while True:
            self._look()
            on_look()
            await asyncio.sleep(REPORT_S)

    def close(self) -> None:
        self._look(last=True)
        self._bar.stop()

    def _look(self, *, last: bool = False) -> None:
        for line in self._evaluations.lines():
            self._say(f"  version {line['version']}: validation loss {line['loss']:.4f}")
        newest = max(self._metrics.lines(), key=lambda line: line["step"], default=None)
        if newest is not None and newest["step"] > self._reported:
            self._show(newest, last=last)

    def _show(self, line: Mapping[str, Any], *, last: bool) -> None:
        text = f"loss {line['loss']:.4f}  {line['tokens_per_s']:.0f} tokens/s"
        self._bar.update(self._task, completed=line["step"] + 1, description=text)
        if self._bar.disable and (last or asyncio.get_running_loop().time() - self._line_at > LINE_S):
            self._line_at = asyncio.get_running_loop().time()
            self._say(f"  step {line['step'] + 1:>4}/{self._steps}  {text}")
        self._reported = line["step"]

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


def write_sft_summary(config: RunConfig, run: RunDir, prepared: PreparedData, total: LivesTotal) -> Path:
    """summary.json: what was trained on, and the loss from first to last step, over all lives."""
    rows = last_by(read_jsonl(run.metrics), "step")
    evaluations = [line["loss"] for line in last_by(read_jsonl(run.evaluations), "version")]
    ended = None
    with contextlib.suppress(FileNotFoundError):
        ended = json.loads(run.ended.read_text(encoding="utf-8"))["why"]
    summary = {
        "name": config.name,
        "steps": len(rows),
        "ended": ended,
        "lives": total.lives,
        "wall_s": round(total.wall_s, 1),
        "conversations": prepared.conversations,
        "tokens": prepared.tokens,
        "tokens_trained": prepared.tokens_trained,
        "left_out": prepared.left_out,
        "loss_first": rows[0]["loss"] if rows else None,
        "loss_last": rows[-1]["loss"] if rows else None,
        "eval_loss_first": evaluations[0] if evaluations else None,
        "eval_loss_last": evaluations[-1] if evaluations else None,
        "updates_skipped": sum(row["updates_skipped"] for row in rows),
        "checkpoints_damaged": rows[-1]["checkpoints_damaged"] if rows else 0,
        "restarts": dict(total.restarts),
        "model": config.sft.out or str(run.root / "final_model"),
    }
    write_atomically(run.summary, json.dumps(summary, indent=2) + "\n")
    return run.summary
