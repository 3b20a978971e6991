"""`penstock simulate`: what a cluster would do, before it costs GPU hours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.deploy.commands.shared import AsJson, Overrides, user_errors

if TYPE_CHECKING:
    from penstock.simulator import Simulation

COLUMNS = ("step_s", "tokens_per_s", "trainer_bubble", "rollout_bubble", "staleness_mean", "staleness_max")


def simulate(
    setup: Annotated[
        Path | None, typer.Argument(help="A YAML file of a cluster and its work: docs/how/scale.md.", metavar="SETUP")
    ] = None,
    overrides: Overrides = None,
    *,
    case: Annotated[str | None, typer.Option(help="A built-in run; `list` names them.")] = None,
    sweep: Annotated[str | None, typer.Option(help="key=a,b,c: one run for each value, as a table.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Predict published and local runs and report the errors.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Simulate a run: step time, throughput, waiting times, staleness, and which split of GPUs would be faster.

    Nothing is started; a discrete-event model plays servers, gate and trainer in seconds.

    Examples: penstock simulate simulator/setups/agentic-64.yaml
    penstock simulate simulator/setups/agentic-64.yaml --sweep max_staleness=0,1,2,4
    penstock simulate --case verl-7b-64-64 --json · penstock simulate --check
    """
    from penstock.simulator import BadSetup, StuckSimulation, case_names

    with user_errors(BadSetup, StuckSimulation):
        if check:
            raise typer.Exit(_check(as_json))
        if case == "list":
            typer.echo("\n".join(case_names()))
            return
        config = _config(setup, case, overrides or [])
        if sweep is None:
            _one(config, as_json)
        else:
            _sweep(config, sweep, as_json)


def _config(setup: Path | None, case: str | None, overrides: list[str]) -> Simulation:
    from penstock.simulator import BadSetup, changed, of_case, of_file

    if case is not None:  # the first argument is an override already
        return changed(of_case(case), [str(setup), *overrides] if setup is not None else overrides)
    if setup is None:
        raise BadSetup("name a setup file, --case NAME (--case list shows them), or --check; --help has examples")
    return changed(of_file(setup), overrides)


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


def _check(as_json: bool) -> int:
    """Returns the exit status: 0 if both largest errors are within their bounds."""
    from penstock.simulator import check

    report = check()
    if as_json:
        typer.echo(json.dumps(report))
        return 0 if report["ok"] else 1
    for name, row in report["published"].items():
        note = "  (a constant comes from it: not counted)" if row["calibrates"] else ""
        line = f"published {row['published']:.2f}x  predicted {row['predicted']:.2f}x"
        typer.echo(f"{name:32} {line}  {row['error']:.1%}{note}")
    for name, row in report["local"].items():
        note = "" if row["counted"] else "  (the machine's load changed: not counted)"
        line = f"measured {row['measured_s']:.2f} s  predicted {row['predicted_s']:.2f} s"
        typer.echo(f"{name:32} {line}  {row['error']:.1%}{note}")
    for name, value in report["figures"].items():
        typer.echo(f"{name}: {value:.3f}")
    return 0 if report["ok"] else 1
