"""`penstock simulate`: what a cluster would do, before it costs GPU hours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import penstock
from penstock.deploy.commands.shared import AsJson, Overrides, user_errors

if TYPE_CHECKING:
    from penstock.simulator import Simulation

COLUMNS = ("step_s", "tokens_per_s", "trainer_bubble", "rollout_bubble", "staleness_mean", "staleness_max")


def _own_or_shipped(setup: Path) -> Path:
    shipped = Path(penstock.__file__).parent / "simulator" / "setups" / setup.name
    return shipped if not setup.exists() and shipped.is_file() else setup


def simulate(
    setup: Annotated[
        Path,
        typer.Argument(
            help="A YAML file of a cluster and its work, as on the page 'Scale', or the name of one that ships.",
            callback=_own_or_shipped,
        ),
    ],
    overrides: Overrides = None,
    *,
    sweep: Annotated[str | None, typer.Option(help="key=a,b,c: one run for each value, as a table.")] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a run: step time, throughput, waiting times, staleness, and which split of GPUs would be faster.

    Nothing is started; a discrete-event model plays servers, gate and trainer in seconds.

    Examples: penstock simulate agentic-64.yaml
    penstock simulate agentic-64.yaml --sweep max_staleness=0,1,2,4
    """
    from penstock.simulator import BadSetup, StuckSimulation, changed, of_file

    with user_errors(BadSetup, StuckSimulation):
        config = changed(of_file(setup), overrides or [])
        if sweep is None:
            _one(config, as_json)
        else:
            _sweep(config, sweep, as_json)


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
