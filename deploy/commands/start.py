"""The first commands: `penstock quickstart`, `penstock init` and `penstock recipes`."""

from __future__ import annotations

import json
import shlex
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from penstock.deploy.commands.shared import AsJson, Overrides, user_errors
from penstock.deploy.recipe_tree import ConfigError

COLUMNS = ("name", "needs", "about")
"""Columns of `penstock recipes`: headings of its tables, keys of its JSON."""


def quickstart(overrides: Overrides = None) -> None:
    """Train a small model to use a Python sandbox: one or two minutes on two CPU cores.

    A model of 1.2 million parameters learns from reward alone to call its tool. The run is in runs/quickstart-…;
    its page is served while it runs, and later by `penstock dashboard`.

    Example: penstock quickstart trainer.steps=20 max_staleness=sync
    """
    from penstock.common.http_server import listen
    from penstock.dashboard import DashboardConfig
    from penstock.deploy.commands.run import run_recipe
    from penstock.deploy.recipe_tree import RECIPES

    recipe, usual = RECIPES / "calculator.yaml", DashboardConfig()
    with listen(usual.host, usual.port, ports=50) as free:
        page = f"dashboard.port={free.getsockname()[1]}"
    name = f"name=quickstart-{time.strftime('%Y%m%d-%H%M%S')}"
    settings = [name, "dashboard.enabled=true", page, *(overrides or [])]
    with user_errors():
        # `pip install penstock` leaves these packages and programs out.
        from penstock.deploy.config import load_config
        from penstock.deploy.preflight.network import check_redis
        from penstock.deploy.preflight.sandbox import check_sandbox
        from penstock.deploy.preflight.suite import refuse_doomed

        if missing := [name for name in ("torch", "accelerate", "safetensors") if find_spec(name) is None]:
            raise ConfigError(f"{', '.join(missing)}: not installed\n  fix: pip install 'penstock[train,hf]'")
        config = load_config(recipe, settings)
        refuse_doomed(check for check in (check_redis(config), check_sandbox(config)) if check is not None)
    status = run_recipe(recipe, settings, resume=False, dry_run=False)
    if status == 0:
        typer.echo("look at it: penstock dashboard    a project of your own: penstock init FOLDER", err=True)
    raise typer.Exit(status)


def init(
    folder: Annotated[Path, typer.Argument(help="A new or empty folder.", metavar="FOLDER")],
    template: Annotated[
        str,
        typer.Option("--from", help="calculator, retool, search_r1, swe, harbor or openai; each is described above."),
    ] = "calculator",
) -> None:
    """Make a small project that trains at once: a recipe, the parts that are yours to change, a README of ten lines.

    calculator: a loop, a tool and a reward of your own; a small model learns to call the tool. Start here.

    retool: arithmetic with a Python sandbox, scripted policies that prove the environment, a cold start.

    search_r1: questions answered by searching a corpus with a search server of yours, after a cold start.

    swe: small Python packages broken one function at a time, hidden tests, a shell agent.

    harbor: task folders of Harbor or Terminal-Bench as they are, with tools or a coding agent; no Python.

    openai: any OpenAI client as the agent, recorded and trained; here one of the OpenAI Agents SDK.

    Every file is yours to change; README.md has the commands in order. All of them run on two CPU cores; the model
    of harbor comes from the Hugging Face hub.

    Example: penstock init mine --from calculator && cd mine
    """
    from penstock.deploy.shipped import write_project

    with user_errors():
        for name in write_project(folder, template):
            typer.echo(f"  {folder / name}")
        typer.echo(f"next: cd {shlex.quote(str(folder))}, then the commands of README.md:\n")
        typer.echo((folder / "README.md").read_text(encoding="utf-8"))


def recipes(*, as_json: AsJson = False) -> None:
    """List the recipes that ship: name, what it needs, what is learned; and the templates of `penstock init`.

    Their files are in the folder of the first line; `penstock init` makes a project of your own of one of them.
    """
    from penstock.deploy.recipe_tree import RECIPES
    from penstock.deploy.shipped import shipped_recipes, templates

    shipped = [(one.file, one.needs, one.about) for one in shipped_recipes()]
    starters = [(one.name, "CPU", one.about) for one in templates().values()]
    if as_json:
        tables = {"recipes": shipped, "templates": starters}
        named = {name: [dict(zip(COLUMNS, row, strict=True)) for row in table] for name, table in tables.items()}
        typer.echo(json.dumps({"folder": str(RECIPES.resolve()), **named}))
        return
    widths = [max(len(row[column]) for row in [COLUMNS, *shipped, *starters]) for column in (0, 1)]
    for title, rows in (
        (f"recipes, for `penstock run NAME`, in {RECIPES.resolve()}:", shipped),
        ("\ntemplates, for `penstock init FOLDER --from NAME`:", starters),
    ):
        typer.echo(title)
        for name, needs, about in [COLUMNS, *rows]:
            typer.echo(f"  {name:{widths[0]}}  {needs:{widths[1]}}  {about}")
