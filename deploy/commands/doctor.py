"""`penstock doctor`: everything that can be found wrong before it costs GPU hours."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.deploy.commands.shared import AsJson, Overrides, own_or_shipped
from penstock.deploy.config import load_config
from penstock.deploy.recipe_tree import ConfigError

if TYPE_CHECKING:
    from penstock.deploy.config import RunConfig
    from penstock.deploy.preflight.check import Check
    from penstock.deploy.preflight.layouts import Layout
    from penstock.deploy.preflight.memory_checks import RecipeMemory
    from penstock.deploy.preflight.model_shape import ModelShape

STYLES = {"ok": "green", "warn": "yellow", "skip": "dim", "FAIL": "red"}


def doctor(
    recipe: Annotated[
        Path | None, typer.Argument(help="A recipe; not needed with --join.", metavar="RECIPE", callback=own_or_shipped)
    ] = None,
    overrides: Overrides = None,
    *,
    as_json: AsJson = False,
    join: Annotated[
        bool, typer.Option("--join", help="Check whether this machine can join the running run that connect.env names.")
    ] = False,
    serve: Annotated[bool, typer.Option("--serve", help="Check it for penstock serve, which needs no tasks.")] = False,
    recipes: Annotated[
        Path | None,
        typer.Option(
            "--recipes",
            metavar="FOLDER",
            help="Check the memory of every recipe below a folder for the GPUs that its first comment declares.",
        ),
    ] = None,
    described: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="With --recipes or --gpus: the config.json, or its folder, with the sizes of the model.",
        ),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            "--gpus",
            metavar="COUNTxGB",
            help="Propose trainer layouts for COUNT GPUs with GB of memory each, such as 64x80.",
        ),
    ] = None,
) -> None:
    """Check that this machine can run a recipe, and report how to fix what fails.

    Versions, ports, Redis, disk, memory, model, template, data, rewards, boxes (three attacks from inside one).
    Exits with 1 if one fails.

    Examples: penstock doctor recipes/calculator.yaml trainer.ranks=2
    penstock doctor service.yaml --serve
    . runs/mine/connect.env; penstock doctor --join
    penstock doctor --recipes recipes
    penstock doctor recipes/retool/gpu8.yaml model=Qwen/Qwen3-30B-A3B --gpus 64x80
    """
    try:
        if gpus is not None:
            raise typer.Exit(0 if _layouts(recipe, overrides or [], gpus, described, as_json) else 1)
        if recipes is not None or described is not None:
            raise typer.Exit(0 if _of_folder(recipes, described, as_json, alone=recipe is None and not join) else 1)
        checks = _joining(recipe, overrides or []) if join else _running(recipe, overrides or [], serve=serve)
        ok = _as_json(checks) if as_json else _as_lines(checks)
    except ConfigError as error:
        if as_json:
            print(json.dumps({"checks": [], "ok": False, "error": str(error)}))
        else:
            typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(0 if ok else 1)


def _running(recipe: Path | None, overrides: list[str], *, serve: bool) -> Iterator[Check]:
    """Raises `ConfigError`."""
    from penstock.deploy.preflight.suite import all_checks, service_checks

    if recipe is None:
        raise ConfigError("RECIPE is missing: penstock doctor recipes/calculator.yaml, or --join for a running run")
    config = load_config(recipe, overrides, with_tasks=not serve)
    return service_checks(config) if serve else all_checks(config)


def _joining(recipe: Path | None, overrides: list[str]) -> Iterator[Check]:
    """Yield checks of the run in the environment, else of the recipe's run in its folder. Raises `ConfigError`."""
    from penstock.deploy.preflight.running_run import check_run, config_of, why_not
    from penstock.deploy.preflight.suite import joining_checks
    from penstock.deploy.run.connection import TOKEN_VARIABLE, RunConnection, connection_of_run
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
    listed = list(checks)
    ok = all(check.ok for check in listed)
    print(json.dumps({"checks": [_plain(check) for check in listed], "ok": ok}))
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


# memory of recipes --------------------------------------------------------------------------------------------------
def _of_folder(folder: Path | None, described: Path | None, as_json: bool, *, alone: bool) -> bool:
    """Return True if no check fails. Raises `ConfigError`."""
    from rich.console import Console

    from penstock.deploy.preflight.memory_checks import check_recipes

    if folder is None:
        raise ConfigError("--config goes with --recipes FOLDER: the sizes of one recipe's model are those of its files")
    if not alone:
        raise ConfigError("--recipes FOLDER goes without RECIPE, KEY=VALUE and --join: it reads every recipe as it is")
    if not folder.is_dir():
        raise ConfigError(f"--recipes {folder}: no such folder; name one with recipes below it, such as recipes")
    recipes = list(check_recipes(folder, described))
    ok = all(one.check.ok for one in recipes)
    if as_json:
        print(json.dumps({"recipes": [_figures(one) for one in recipes], "ok": ok}))
        return ok
    console = Console(highlight=False)
    rows = [("", "recipe", "model", "GPUs", "sum", "limit"), *map(_row, recipes)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row, one in zip(rows, [None, *recipes], strict=True):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        console.print(line.rstrip(), style=STYLES[one.check.verdict] if one else "bold", markup=False, soft_wrap=True)
        if one and not one.check.ok:
            console.print(f"      {one.check.found}", markup=False, soft_wrap=True)
            console.print(f"      fix: {one.check.fix}", markup=False, soft_wrap=True)
    for one in recipes:
        if one.check.skipped:
            console.print(f"{one.recipe}: {one.check.found}", markup=False, soft_wrap=True)
    return ok


def _figures(one: RecipeMemory) -> dict[str, object]:
    gpus = {"count": one.gpus.count, "bytes": one.gpus.bytes} if one.gpus else None
    sums = {"total_bytes": round(sum(one.parts.values())), "limit_bytes": round(one.limit)}
    parts = {name: round(size) for name, size in one.parts.items()}
    return {**_plain(one.check), "model": one.model, "sizes": one.sizes, "gpus": gpus, "parts": parts, **sums}


def _row(one: RecipeMemory) -> tuple[str, ...]:
    from penstock.deploy.preflight.check import human

    gpus = f"{one.gpus.count} x {one.gpus.bytes >> 30} GB" if one.gpus else ""
    sums = (human(sum(one.parts.values())), human(one.limit)) if one.parts else ("", "")
    return (one.check.verdict, one.recipe, one.model, gpus, *sums)


# layouts -------------------------------------------------------------------------------------------------------------
SHOWN_LAYOUTS = 8


def _layouts(recipe: Path | None, overrides: list[str], gpus: str, described: Path | None, as_json: bool) -> bool:
    """Return True if a layout fits. Raises `ConfigError`."""
    from penstock.deploy.preflight.layouts import find_layouts
    from penstock.deploy.preflight.memory_checks import USABLE
    from penstock.deploy.preflight.model_shape import described_shape, find_shape

    if (match := re.fullmatch(r"(\d+)x(\d+)", gpus)) is None or 0 in (count := (int(match[1]), int(match[2]))):
        raise ConfigError(f"--gpus {gpus}: give the trainer's GPUs and the GB of each, such as 64x80")
    if recipe is None:
        raise ConfigError("--gpus goes with a RECIPE: its model and the lengths of its rows decide what fits")
    config = load_config(recipe, overrides)
    shape = described_shape(described) if described is not None else find_shape(config)[0]
    if shape is None:
        raise ConfigError(f"--gpus: the sizes of {config.model} are not known here: name its config.json with --config")
    layouts = find_layouts(config, shape, count[0], count[1] << 30)
    limit = USABLE * (count[1] << 30)
    fits = layouts[0].bytes <= limit
    if as_json:
        print(json.dumps({"layouts": [_layout(one, config, limit) for one in layouts], "ok": fits}))
    else:
        _print_layouts(layouts[:SHOWN_LAYOUTS], config, shape, limit, fits=fits)
    return fits


def _layout(one: Layout, config: RunConfig, limit: float) -> dict[str, object]:
    sizes = {"total_bytes": one.bytes, "limit_bytes": limit, "tokens": one.tokens}
    sizes |= {"received_bytes": one.received, "exchanged_bytes": one.exchanged}
    parts = {name: round(size) for name, size in one.parts.items()}
    words = {"settings": one.words(config), "simulation": one.simulation}
    return {**words, "parts": parts} | {name: round(size) for name, size in sizes.items()}


def _print_layouts(
    layouts: Sequence[Layout], config: RunConfig, shape: ModelShape, limit: float, *, fits: bool
) -> None:
    from rich.console import Console

    from penstock.deploy.preflight.check import human

    say = partial(Console(highlight=False).print, markup=False, soft_wrap=True)
    experts = f", {shape.experts / 1e9:.1f} of them in experts" if shape.experts else ""
    say(f"{config.model}: {shape.parameters / 1e9:.1f} billion parameters{experts}")
    say(f"{human(limit)} of a GPU can be used; bytes of weights, gradients and tokens are those of a pack\n")
    rows = [("of a GPU", "pack", "weights, gradients", "tokens of experts", "settings")]
    for one in layouts:
        received = (human(one.received), human(one.exchanged) if one.exchanged else "")
        rows.append((human(one.bytes), f"{one.tokens:,.0f}", *received, one.words(config)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, row in enumerate(rows):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        say(line.rstrip(), style="" if number else "bold")
    if fits:
        say(f"\nthe first one at an estimated speed: penstock simulate SETUP {layouts[0].simulation}")
    else:
        part = max(layouts[0].parts, key=layouts[0].parts.__getitem__)
        say(f"\nnone fits; this one needs least, most of it for {part}: take more GPUs, or LoRA", style="red")
