"""`penstock doctor`: everything that can be found wrong before it costs GPU hours."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.deploy.config import ConfigError, load_config

if TYPE_CHECKING:
    from penstock.deploy.preflight import Check

STYLES = {"ok": "green", "warn": "yellow", "skip": "dim", "FAIL": "red"}


def doctor(
    recipe: Annotated[
        Path | None, typer.Argument(help="A recipe: one YAML file; not needed with --join.", metavar="RECIPE")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value …", metavar="[KEY=VALUE]…")] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    join: Annotated[
        bool, typer.Option("--join", help="Check whether this machine can join the running run that connect.env names.")
    ] = False,
) -> None:
    """Check that this machine can run a recipe, and report how to fix what fails.

    Versions, ports, Redis, disk, memory, model, template, data, rewards, boxes (three attacks from inside one); every
    check is explained in docs/doctor.md. Exits with 1 if one fails.

    Examples: penstock doctor recipes/calculator.yaml trainer.ranks=2
    . runs/mine/connect.env; penstock doctor --join
    """
    try:
        checks = _joining(recipe, overrides or []) if join else _running(recipe, overrides or [])
        ok = _as_json(checks) if as_json else _as_lines(checks)
    except ConfigError as error:
        if as_json:
            print(json.dumps({"checks": [], "ok": False, "error": str(error)}))
        else:
            typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(0 if ok else 1)


def _running(recipe: Path | None, overrides: list[str]) -> Iterator[Check]:
    """Raises `ConfigError`."""
    from penstock.deploy.preflight import all_checks

    if recipe is None:
        raise ConfigError("RECIPE is missing: penstock doctor recipes/calculator.yaml, or --join for a running run")
    return all_checks(load_config(recipe, overrides))


def _joining(recipe: Path | None, overrides: list[str]) -> Iterator[Check]:
    """Of the run in the environment, else of the recipe's living run in its folder. Raises `ConfigError`."""
    from penstock.deploy.connection import TOKEN_VARIABLE, RunConnection, connection_of_run
    from penstock.deploy.preflight import joining_checks
    from penstock.deploy.preflight.network import check_run, config_of, why_not
    from penstock.transfer_queue import QueueError

    link = connection_of_run(load_config(recipe, overrides)) if recipe is not None else RunConnection.from_environment()
    os.environ.setdefault(TOKEN_VARIABLE, link.token)  # a sandbox server is asked with the run's
    try:
        config = asyncio.run(config_of(link))
    except QueueError as error:
        yield from asyncio.run(why_not(link, error))
        return
    yield from asyncio.run(check_run(link, config))
    yield from joining_checks(config)


def _as_json(checks: Iterable[Check]) -> bool:
    found = list(checks)
    ok = all(check.ok for check in found)
    print(json.dumps({"checks": [_plain(check) for check in found], "ok": ok}))
    return ok


def _plain(check: Check) -> dict[str, object]:
    shown = {"name": check.name, "ok": check.ok, "verdict": check.verdict.lower(), "found": check.found}
    return {**shown, "fix": check.fix if check.verdict in ("FAIL", "warn") else ""}


def _as_lines(checks: Iterable[Check]) -> bool:
    from rich.console import Console

    console, counts = Console(highlight=False), dict.fromkeys(STYLES, 0)
    for check in checks:
        counts[check.verdict] += 1
        console.print(f"{check.verdict:4}", style=STYLES[check.verdict], end="  ")
        console.print(f"{check.name}: {check.found}", markup=False, soft_wrap=True)
        if check.verdict in ("FAIL", "warn"):
            console.print(f"      fix: {check.fix}", markup=False, soft_wrap=True)
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    console.print(summary, markup=False)
    return not counts["FAIL"]
