"""`penstock quickstart`: from an installed package to a trained model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from penstock.deploy.commands.guard import guarded
from penstock.deploy.config import ConfigError

RECIPE = "calculator.yaml"
PACKAGES = ("torch", "accelerate", "safetensors")
INSTALL = "pip install 'penstock[train,hf]'"
PAGE_PORTS = 50
"""Tried from the page's usual one on."""


def quickstart(
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value …", metavar="[KEY=VALUE]…")] = None,
) -> None:
    """Train the calculator, from nothing: makes its base model where there is none, trains it, shows page and result.

    A model of 1.2 million parameters learns from reward alone to call a Python sandbox, in a minute or two on two CPU
    cores. From a wheel its base model is made first, once, in ten minutes or more of one core, and kept
    in ~/.cache/penstock. The run is in runs/quickstart-…; its page is served meanwhile, later by `penstock dashboard`.

    Example: penstock quickstart trainer.steps=20 max_staleness=sync
    """
    guarded(lambda: _quickstart(overrides or []))


def _quickstart(overrides: Sequence[str]) -> None:
    from penstock.deploy.commands.run import run_recipe
    from penstock.deploy.shipped import FOLDER, find_base_model, make_base_model

    recipe = FOLDER / RECIPE
    given = [f"name=quickstart-{time.strftime('%Y%m%d-%H%M%S')}", "dashboard.enabled=true", *_page(), *overrides]
    _refuse_without_programs(recipe, given)
    if not any(one.startswith("model=") for one in overrides):
        model = find_base_model()
        if model is None:
            typer.echo("making the base model, once: ten minutes of one core", err=True)
            model = make_base_model()
        given.append(f"model={model}")
    status = run_recipe(recipe, given, resume=False, dry_run=False)
    if status == 0:
        typer.echo("look at it: penstock dashboard    a project of your own: penstock init FOLDER", err=True)
    raise typer.Exit(status)


def _page() -> list[str]:
    """The page's port: the usual one, or the next that is free."""
    from penstock.common.http_server import listen
    from penstock.dashboard import DashboardConfig

    usual = DashboardConfig()
    with listen(usual.host, usual.port, ports=PAGE_PORTS) as free:
        return [f"dashboard.port={free.getsockname()[1]}"]


def _refuse_without_programs(recipe: Path, overrides: Sequence[str]) -> None:
    """What a wheel cannot bring, before minutes go into a model. Raises `ConfigError`."""
    from penstock.deploy.config import load_config
    from penstock.deploy.preflight.network import check_redis
    from penstock.deploy.preflight.sandbox import check_sandbox

    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise ConfigError(f"{', '.join(missing)}: not installed\n  fix: {INSTALL}")
    config = load_config(recipe, overrides)
    failed = [one for one in (check_redis(config), check_sandbox(config)) if one is not None and not one.ok]
    if failed:
        raise ConfigError("\n".join(f"{one.name}: {one.found}\n  fix: {one.fix}" for one in failed))
