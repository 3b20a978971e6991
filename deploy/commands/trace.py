"""`penstock trace`: a run as a file for Perfetto or Chrome."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.deploy.commands.shared import RUNS, RunName, RunsDir, folder_of_run, user_errors

if TYPE_CHECKING:
    from penstock.deploy.telemetry.trace import StepRange


def trace(
    run: RunName,
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("trace.json"),
    steps: Annotated[str, typer.Option(metavar="A:B", help="Steps A to B-1; either may be left out.")] = ":",
    runs_dir: RunsDir = RUNS,
) -> None:
    """Write a trace of every role of a run, for https://ui.perfetto.dev or chrome://tracing.

    Trainer: steps with their phases, publishing, checkpoints. Rollout servers: weight swaps with their pauses. Agent
    workers: the recorded episodes (trainer.save_trajectories of each step) with turns, model and tool calls.
    Evaluations. Works for running and finished runs.

    Example: penstock trace mine --steps 100:110 --out mine.json
    """
    from penstock.common import write_atomically
    from penstock.deploy.telemetry.trace import NothingToDraw, chrome_trace, collect

    with user_errors(NothingToDraw, ValueError):
        root = folder_of_run(run, runs_dir)
        processes = collect(root, weight_updates(root), steps_of(steps))
    text = json.dumps(chrome_trace(processes))
    write_atomically(out, text)
    listed = ", ".join(f"{process.name} ({len(process.slices)})" for process in processes)
    typer.echo(f"{out}: {len(text) / 1e6:.1f} MB; {listed}", err=True)


def steps_of(text: str) -> StepRange:
    """Raises `ValueError` with the fix."""
    from penstock.deploy.telemetry.trace import StepRange

    first, colon, end = text.partition(":")
    if not colon or not all(part.isdigit() for part in (first, end) if part):
        raise ValueError(f"--steps {text!r}: write A:B, for example 100:110, 100: or :10")
    return StepRange(int(first or 0), int(end) if end else None)


def weight_updates(root: Path) -> list[dict[str, Any]]:
    """Return weight updates from the queue of a running run, else as the run wrote them when it ended."""
    from penstock.common import read_jsonl
    from penstock.deploy.recipe_tree import ConfigError
    from penstock.deploy.run.connection import INTERACTIVE, RunConnection
    from penstock.transfer_queue import QueueError

    async def of_queue(connect_env: str) -> list[dict[str, Any]]:
        async with RunConnection.from_lines(connect_env).connected(INTERACTIVE) as queue:
            return [asdict(update) for update in await queue.updates()]

    living = root / "connect.env"
    if living.exists():
        try:
            return asyncio.run(of_queue(living.read_text(encoding="utf-8")))
        except (ConfigError, QueueError, OSError) as error:
            typer.echo(f"no weight swaps: the run's queue does not answer: {error}", err=True)
    return read_jsonl(root / "weight_updates.jsonl")
