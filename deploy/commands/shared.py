"""Shared by the commands: options, a run by its name or folder, user errors as one message."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from penstock.deploy.config import RUN_FILE, RunConfig, load_config
from penstock.deploy.recipe_tree import RECIPES, ConfigError
from penstock.deploy.run_dir import no_such_run

RUNS = Path("runs")


def own_or_shipped(recipe: Path | None) -> Path | None:
    """Returns the path itself if it exists, or the shipped recipe of that name, which is reported."""
    if recipe is None or recipe.exists():
        return recipe
    shipped = RECIPES / Path(*recipe.parts[recipe.parts[:1] == ("recipes",) :])
    if recipe.is_absolute() or not shipped.is_file():
        return recipe
    typer.secho(f"using the recipe that ships with Penstock: {shipped}", dim=True, err=True)
    return shipped


def recipe_or_run(recipe: Path) -> Path | None:
    """Return the configuration of a run's folder, else what `own_or_shipped` returns."""
    folder = run_or_path(recipe)
    return folder / RUN_FILE if (folder / RUN_FILE).is_file() else own_or_shipped(recipe)


def run_or_path(path: Path) -> Path:
    """Return the folder runs/NAME for the name of a run; else the path itself."""
    named = RUNS / path
    return named if not path.exists() and path.name == str(path) and (named / RUN_FILE).is_file() else path


Recipe = Annotated[
    Path,
    typer.Argument(
        help="A YAML or Python file, the name of a recipe that ships, or a run's folder.",
        metavar="RECIPE",
        callback=recipe_or_run,
    ),
]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value …", metavar="[KEY=VALUE]…")]
_json = ContextVar("json", default=False)
"""The command prints JSON."""


def set_json(value: bool) -> bool:
    """Returns `value`: whether the command prints JSON."""
    _json.set(value)
    return value


AsJson = Annotated[
    bool,
    typer.Option(
        "--json", callback=set_json, help='Print one JSON object and nothing else; {"error": …} if the command fails.'
    ),
]
RunName = Annotated[str, typer.Argument(help="A run's folder, or its name in --runs-dir.", metavar="RUN")]
RunsDir = Annotated[Path, typer.Option(help="Folder that holds the runs.")]


@contextlib.contextmanager
def user_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Ends the command with status 2 and the message of a `ConfigError`, or of an error of `kinds`."""
    handled: tuple[type[Exception], ...] = (ConfigError, *kinds)
    try:
        yield
    except handled as error:
        refuse(str(error))


def refuse(message: str, status: int = 2) -> NoReturn:
    """Prints the message, with --json also as ``{"error": …}``, and ends the command."""
    typer.secho(message, fg="red", err=True)
    if _json.get():
        typer.echo(json.dumps({"error": message}))
    raise typer.Exit(status)


def show_progress(text: str) -> None:
    typer.secho(text, dim=True, err=True)


def folder_of_run(run: str, runs_dir: Path) -> Path:
    """Return the folder of a run; a folder here that has its name and is no run does not hide it.

    Raises `ConfigError` if the run does not exist.
    """
    here = Path(run)
    root = here if here.name != run or (here / RUN_FILE).is_file() else runs_dir / run
    if not root.is_dir():
        raise ConfigError(no_such_run(root.parent, root.name))
    return root


def load_run(root: Path, changes: Sequence[str] = ()) -> RunConfig:
    """Return the configuration in the folder of a run, with changes of it. Raises `ConfigError`."""
    return load_config(root / RUN_FILE, changes, with_tasks=False)
