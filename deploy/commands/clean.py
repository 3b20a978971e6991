"""`penstock clean`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def clean(
    recipe: Annotated[
        Path | None, typer.Option(help="End boxes of this recipe's sandbox provider too (kubernetes, e2b, daytona).")
    ] = None,
) -> None:
    """Remove what killed runs of this user left in this machine's shared memory; living runs keep theirs.

    A start of a run does so too. Needed after a run and its supervisor were killed at once (SIGKILL, out of memory).
    With --recipe also boxes at the provider that its `sandbox` section names, whichever run's they are: those whose
    process on this machine is gone, and those of other machines that are past their age.

    Example: penstock clean --recipe recipes/swe/sandbox.yaml
    """
    from penstock.deploy.weights_folder import SHARED_MEMORY, living_folders, remove_abandoned

    removed = remove_abandoned()
    for folder in removed:
        print(f"removed {folder.path} ({folder.bytes / 1e6:.0f} MB): no run uses it")
    for path in living_folders():
        print(f"kept {path}: its run lives")
    if not removed:
        print(f"nothing of a killed run in {SHARED_MEMORY}")
    if recipe is not None:
        _clean_boxes(recipe)


def _clean_boxes(recipe: Path) -> None:
    import asyncio

    from penstock.deploy.config import ConfigError, load_sandbox
    from penstock.sandbox import SandboxError
    from penstock.sandbox.managed import PROVIDERS, end_boxes_of_dead_processes

    try:
        config = load_sandbox(recipe)
        if config.backend not in PROVIDERS:
            print(f"no boxes to look for: those of {config.backend} end with their process")
            return
        ended = asyncio.run(end_boxes_of_dead_processes(config))
    except (ConfigError, SandboxError) as error:
        raise typer.BadParameter(str(error), param_hint="--recipe") from error
    print(f"ended {ended} boxes of {config.backend} whose process is gone")
