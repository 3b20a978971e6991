"""`penstock compose`: a run in containers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.deploy.commands.shared import Overrides, own_or_shipped, user_errors

app = typer.Typer(
    help="A run in containers: Redis, rollout servers, workers, sandbox, trainer, page.", no_args_is_help=True
)


@app.callback()
def group() -> None:
    """A run in containers: Redis, rollout servers, workers, sandbox, trainer, page.

    The page "Launching" has the steps.
    """


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="New folder: compose.yaml, .env, secrets, and what the run leaves.")],
    recipe: Annotated[
        Path, typer.Argument(help="A recipe; containers see its folder as /work/recipes.", callback=own_or_shipped)
    ],
    overrides: Overrides = None,
    trainer_gpus: Annotated[str | None, typer.Option(help="NVIDIA GPUs of the trainer, as 0,1.")] = None,
    rollout_gpus: Annotated[
        list[str] | None, typer.Option(help="GPUs of one rollout server; repeat for each further server.")
    ] = None,
) -> None:
    """Make a folder that `docker compose up` runs in, with its own passwords (files of mode 0600).

    Example: penstock compose init stack recipes/calculator.yaml name=mine && cd stack && docker compose up -d
    """
    from penstock.deploy.placements.compose.stack import Stack, make_stack
    from penstock.transfer_queue import QueueError

    if bool(trainer_gpus) != bool(rollout_gpus):
        raise typer.BadParameter("--trainer-gpus and --rollout-gpus must be given together")
    with user_errors(QueueError):
        config = make_stack(Stack(folder, recipe, overrides or [], trainer_gpus, rollout_gpus or []))
    typer.echo(f"run {config.name}: cd {folder} && docker compose up -d", err=True)
    typer.echo(f"page: http://127.0.0.1:8600/, its token is in {folder / 'secrets' / 'token'}", err=True)
