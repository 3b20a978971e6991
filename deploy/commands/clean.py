"""`penstock clean`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer


def clean(
    recipe: Annotated[
        Path | None,
        typer.Option(help="Also what boxes left at the sandbox provider, or Docker engine, of this recipe."),
    ] = None,
) -> None:
    """Remove what killed runs of this user left in this machine's shared memory, and the cgroups of their boxes; living
    runs keep theirs.

    A start of a run does so too. Needed after a run and its supervisor were killed at once (SIGKILL, out of memory).
    With --recipe also boxes at the provider that its `sandbox` section names, and containers and images of snapshots
    if that is docker, whichever run's they are: those whose process on this machine is gone, and those of other
    machines that are past their age.

    Example: penstock clean --recipe recipes/swe/sandbox.yaml
    """
    from penstock.deploy.config import load_sandbox
    from penstock.deploy.recipe_tree import ConfigError
    from penstock.deploy.run.weights_folder import SHARED_MEMORY, living_folders, remove_abandoned
    from penstock.sandbox import SandboxError, remove_abandoned_cgroups
    from penstock.sandbox.docker import clear_away_dead_processes
    from penstock.sandbox.managed import PROVIDERS, end_boxes_of_dead_processes

    removed = remove_abandoned()
    for folder in removed:
        print(f"removed {folder.path} ({folder.bytes / 1e6:.0f} MB): no run uses it")
    for path in living_folders():
        print(f"kept {path}: its run lives")
    if not removed:
        print(f"nothing of a killed run in {SHARED_MEMORY}")
    if boxes := remove_abandoned_cgroups():
        print(f"removed the cgroups of {boxes} boxes whose process is gone")
    if recipe is None:
        return
    try:
        config = load_sandbox(recipe)
        if config.backend == "docker":
            cleared = asyncio.run(clear_away_dead_processes())
            print(f"removed {cleared.containers} containers and {cleared.images} snapshots whose process is gone")
        elif config.backend in PROVIDERS:
            ended = asyncio.run(end_boxes_of_dead_processes(config))
            print(f"ended {ended} boxes of {config.backend} whose process is gone")
        else:
            print(f"no boxes to look for: those of {config.backend} end with their process")
    except (ConfigError, SandboxError) as error:
        raise typer.BadParameter(str(error), param_hint="--recipe") from error
