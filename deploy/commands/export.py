"""`penstock train export`: a checkpoint of a run as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
import yaml


def export(
    run: Annotated[Path, typer.Argument(help="A run's folder, runs/NAME.")],
    folder: Annotated[Path, typer.Argument(help="The Hugging Face folder to be made.")],
    step: Annotated[int | None, typer.Option(help="Of which step; the newest checkpoint without it.")] = None,
) -> None:
    """Write the weights of a checkpoint as a Hugging Face folder, in one process, whatever number of ranks saved them.

    Example: penstock train export runs/mine models/mine --step 40
    """
    from penstock.deploy.config import ConfigError, parse_config
    from penstock.deploy.run_dir import RunDir
    from penstock.trainer import export_checkpoint

    place = RunDir(run)
    try:
        config = parse_config(yaml.safe_load(place.config.read_text()), source=str(place.config))
        checkpoint = _checkpoint(place.checkpoints, step)
        done = export_checkpoint(checkpoint, config.model, config.trainer, folder)
    except (OSError, ValueError, ConfigError) as error:
        typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(2) from None
    typer.echo(f"{folder}: the weights after {done} steps")


def _checkpoint(folder: Path, step: int | None) -> Path:
    """Raises `FileNotFoundError`."""
    found = sorted(path for path in folder.glob("step_*") if not path.suffix)
    wanted = [path for path in found if step is None or path.name == f"step_{step:08d}"]
    if not wanted:
        there = ", ".join(path.name for path in found) or "none"
        raise FileNotFoundError(
            f"{folder} has no checkpoint{'' if step is None else f' of step {step}'}; there: {there}"
        )
    return wanted[-1]
