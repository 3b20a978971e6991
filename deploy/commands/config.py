"""`penstock config`: the settings of recipes, and recipes from those of other frameworks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.deploy.commands.shared import refuse, user_errors

if TYPE_CHECKING:
    from penstock.deploy.migrate.convert import Migration

app = typer.Typer(help="Look settings up; make recipes from those of other frameworks.", no_args_is_help=True)


@app.command("keys")
def list_keys(
    word: Annotated[str, typer.Argument(help="A key, a section, or any part of one. Without: all.")] = "",
) -> None:
    """List the settings of a recipe: key, default and meaning.

    Example: penstock config keys trainer.lr
    """
    from penstock.deploy.config import RunConfig
    from penstock.deploy.config_schema import list_settings

    chosen = [setting for setting in list_settings(RunConfig) if word in setting.key]
    if not chosen:
        refuse(f"no setting has {word!r} in its key; `penstock config keys` lists all")
    for setting in chosen:
        default = "required" if setting.default is None else f"default {setting.default}"
        typer.echo(f"{setting.key}  ({default})")
        if setting.description:
            typer.echo(f"    {setting.description}")


@app.command()
def from_verl(
    source: Annotated[
        Path | None, typer.Argument(help="verl's YAML, or the shell script that starts main_ppo.", metavar="[FILE]")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="As verl takes them: a.b=value …", metavar="[A.B=V]…")
    ] = None,
    *,
    out: Annotated[Path | None, typer.Option(help="Write the recipe here instead of to the standard output.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file of --out if it exists.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Write nothing and exit with 1 if a given key is not taken over.")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="List also the keys that were taken over or need no counterpart.")
    ] = False,
) -> None:
    """Make a recipe of verl's settings: the same data and reward function, other names.

    Keys that are not taken over are listed with what to do instead; keys that are not given have verl's defaults.
    A script is read, not run.

    Example: penstock config from-verl run_grpo.sh trainer.total_training_steps=100 --out recipe.yaml
    """
    from penstock.deploy.migrate.convert import migrate
    from penstock.deploy.migrate.source import BadSource, read_source

    if source is None:
        refuse("give verl's YAML file, the shell script that starts main_ppo, or settings as a.b=value")
    if out is not None and out.exists() and not overwrite:
        refuse(f"{out} is there already: give --overwrite, or write to another file")
    words = list(overrides or [])
    if "=" in source.name and not source.exists():
        words, source = [str(source), *words], None  # without a file the first word is an override already
    with user_errors(BadSource):
        migration = migrate(read_source(source, words))
        migration.check()
        if not migration.account.mapped:
            raise BadSource(f"{source or ' '.join(words)}: no setting of verl that a recipe has")
    _print_summary(migration, everything)
    if strict and migration.account.unmapped:
        raise typer.Exit(1)
    if out is None:
        typer.echo(migration.yaml(), nl=False)
    else:
        out.write_text(migration.yaml(), encoding="utf-8")
        typer.echo(f"{out} is written; next: penstock doctor {out}", err=True)


def _print_summary(migration: Migration, everything: bool) -> None:
    if everything:
        for key, ours in migration.account.mapped.items():
            typer.echo(f"{key} → {ours}", err=True)
        for key, why in migration.account.ignored.items():
            typer.echo(f"{key}: nothing to set; {why}", err=True)
    for one in migration.account.unmapped:
        typer.secho(f"not taken over: {one.key}={one.value} ({one.why})", fg="yellow", err=True)
    for note in migration.notes:
        typer.secho(f"note: {note}", fg="yellow", err=True)
    sizes = len(migration.account.mapped), len(migration.account.unmapped), len(migration.account.ignored)
    summary = "{} settings taken over, {} not taken over, {} with nothing to set".format(*sizes)
    typer.echo(summary + ("" if everything else " (--all names them)"), err=True)
