"""`penstock simulate`: what a cluster would do, before it costs GPU hours."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import penstock
from penstock.deploy.commands.shared import RUNS, AsJson, Overrides, RunsDir, folder_of_run, user_errors

if TYPE_CHECKING:
    from penstock.simulator import Prediction, Simulation

COLUMNS = ("step_s", "tokens_per_s", "trainer_bubble", "rollout_bubble", "staleness_mean", "staleness_max")


def simulate(
    setup: Annotated[
        Path | None,
        typer.Argument(
            help="A YAML file of a cluster and its work, as on the page 'Scale', or the name of one that ships."
        ),
    ] = None,
    overrides: Overrides = None,
    *,
    run: Annotated[
        str | None,
        typer.Option("--from", help="A run, in place of a setup: its lengths, times and rates, as measured."),
    ] = None,
    runs_dir: RunsDir = RUNS,
    sweep: Annotated[str | None, typer.Option(help="key=a,b,c: one run for each value, as a table.")] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a run: step time, throughput, waiting times, staleness, and which split of GPUs would be faster.

    Nothing is started; a discrete-event model plays servers, gate and trainer in seconds.

    With --from the words after it are changes of the run's setup, and the answer has 92 % intervals.

    Examples: penstock simulate agentic-64.yaml
    penstock simulate agentic-64.yaml --sweep max_staleness=0,1,2,4
    penstock simulate --from calculator max_staleness=0 rollout.servers=2
    """
    from penstock.simulator import BadSetup, StuckSimulation, changed, of_file

    with user_errors(BadSetup, StuckSimulation):
        if run is not None:
            changes = [*([str(setup)] if setup else []), *(overrides or [])]
            _what_if(folder_of_run(run, runs_dir), changes, as_json)
            return
        if setup is None:
            raise BadSetup("name a setup, such as agentic-64.yaml, or a run: penstock simulate --from RUN")
        shipped = Path(penstock.__file__).parent / "simulator" / "setups" / setup.name
        setup = shipped if not setup.exists() and shipped.is_file() else setup
        config = changed(of_file(setup), overrides or [])
        if sweep is None:
            _one(config, as_json)
        else:
            _sweep(config, sweep, as_json)


def _what_if(folder: Path, changes: list[str], as_json: bool) -> None:
    from penstock.deploy.run.plan import has_gpu
    from penstock.simulator import predict_change

    prediction = predict_change(folder, changes, 0 if has_gpu() else os.cpu_count() or 1)
    if as_json:
        figures = {
            "step_s_interval": prediction.step_s,
            "over_run_interval": prediction.over_run,
            **prediction.result.plain(),
        }
        setup = prediction.config.model_dump(mode="json")
        typer.echo(json.dumps({"run": prediction.run.model_dump(), "setup": setup, "figures": figures}))
        return
    for line in _compared(prediction, changes):
        typer.echo(line)


def _compared(prediction: Prediction, changes: list[str]) -> Iterator[str]:
    run, result = prediction.run, prediction.result
    (low, high), (least, most) = prediction.step_s, prediction.over_run
    yield f"measured        step {run.wall_s:.2f} s, {3600 / run.wall_s:.0f} steps per hour ({run.steps} of {run.name})"
    per_hour = f"{3600 / result.step_s:.0f} steps per hour [{3600 / high:.0f}, {3600 / low:.0f}]"
    changed = " ".join(changes) or "as it ran"
    yield f"simulated       step {result.step_s:.2f} s [{low:.2f}, {high:.2f}], {per_hour}: {changed}"
    if changes:
        yield f"over the run    {result.step_s / run.wall_s:.2f} of its step time [{least:.2f}, {most:.2f}]"
    yield f"bubbles         trainer {result.trainer_bubble:.0%}, rollout {result.rollout_bubble:.0%}"
    yield f"staleness       mean {result.staleness_mean:.2f}, at most {result.staleness_max}"


def _one(config: Simulation, as_json: bool) -> None:
    from penstock.simulator import advised

    result = advised(config)
    if as_json:
        typer.echo(json.dumps({"setup": config.model_dump(mode="json"), "figures": result.plain()}))
        return
    typer.echo(f"{config.gpus:g} GPUs: {config.rollout.servers} rollout servers, {config.trainer.ranks} trainer ranks")
    typer.echo(f"step            {result.step_s:.2f} s, of which the trainer trains {result.train_s:.2f} s")
    typer.echo(f"throughput      {result.tokens_per_s:.0f} trained tokens/s")
    typer.echo(f"bubbles         trainer {result.trainer_bubble:.0%}, rollout {result.rollout_bubble:.0%}")
    ages = ", ".join(f"{age}: {share:.0%}" for age, share in result.staleness.items())
    typer.echo(f"staleness       mean {result.staleness_mean:.2f}, by versions {ages}")
    typer.echo(
        f"in the pipeline {result.running_episodes:.0f} episodes running, {result.ready_groups:.0f} groups ready"
    )
    typer.echo(f"advice          {result.advice}")


def _sweep(config: Simulation, sweep: str, as_json: bool) -> None:
    from penstock.simulator import BadSetup, changed
    from penstock.simulator import simulate as run

    key, equals, values = sweep.partition("=")
    if not equals or not values:
        raise BadSetup(f"--sweep {sweep}: write it as key=a,b,c, for example --sweep max_staleness=0,1,2")
    rows = []
    for value in values.split(","):
        figures = run(changed(config, [f"{key}={value}"])).plain()
        rows.append({key: value, **{column: figures[column] for column in COLUMNS}})
    typer.echo(json.dumps({"sweep": rows}) if as_json else _table(rows))


def _table(rows: list[dict[str, Any]]) -> str:
    """Columns as wide as their widest cell."""
    cells = [list(rows[0]), *([_cell(name, value) for name, value in row.items()] for row in rows)]
    widths = [max(len(line[n]) for line in cells) for n in range(len(cells[0]))]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in cells)


def _cell(name: str, value: Any) -> str:
    if isinstance(value, str | int):
        return str(value)
    return f"{value:.0%}" if name.endswith("bubble") else f"{value:.2f}"
