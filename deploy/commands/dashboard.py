"""`penstock dashboard`: the page over a folder of runs."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.deploy.commands.shared import RUNS, refuse

if TYPE_CHECKING:
    from penstock.dashboard import Tokens


def dashboard(
    runs_dir: Annotated[Path, typer.Argument(help="Folder that holds the runs.", metavar="[RUNS]")] = RUNS,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: a free one.")] = 8600,
) -> None:
    """Serve the page: pipeline, curves, trajectories, dead letters and comparison of the runs in a folder.

    Sign in with PENSTOCK_TOKEN if it is set, else with a generated token that is printed;
    PENSTOCK_VIEW_TOKEN, if set, is read-only.
    """
    from penstock.dashboard import CannotListen, serve_page
    from penstock.deploy.run.connection import FolderQueues
    from penstock.deploy.run.roles import run_role

    if runs_dir.is_file():
        refuse(f"{runs_dir} is a file; give the folder that holds the runs")
    if (runs_dir / "config.yaml").is_file():
        refuse(f"{runs_dir} is a run; give the folder that holds it: penstock dashboard {runs_dir.parent}")
    tokens, is_new = _tokens()
    if not any(runs_dir.glob("*/config.yaml")):
        state = "no run in it yet" if runs_dir.is_dir() else "no such folder yet"  # placements start the page first
        typer.echo(f"{runs_dir.resolve()}: {state}; the page shows runs as they come", err=True)

    async def role() -> None:
        # The run that this shell or supervisor belongs to, if any; otherwise only those in the folder.
        from penstock.deploy.run.connection import RUN_VARIABLE, TOKEN_VARIABLE, URL_VARIABLE, RunConnection

        named = all(os.environ.get(name) for name in (URL_VARIABLE, RUN_VARIABLE, TOKEN_VARIABLE))
        queues = FolderQueues(runs_dir.resolve(), RunConnection.from_environment() if named else None)
        await serve_page(runs_dir.resolve(), queues, tokens, host=host, port=port, say=say)

    def say(url: str) -> None:
        if is_new:
            typer.echo(f"token for signing in: {tokens.write}", err=True)
        typer.echo(f"page: {url}", err=True)

    try:
        run_role(role)
    except CannotListen as error:
        refuse(f"--port: {error}")


def _tokens() -> tuple[Tokens, bool]:
    """Return the tokens, and whether the one for signing in is new."""
    from penstock.dashboard import Tokens
    from penstock.deploy.run.connection import TOKEN_VARIABLE, VIEW_TOKEN_VARIABLE

    write, read = os.environ.get(TOKEN_VARIABLE), os.environ.get(VIEW_TOKEN_VARIABLE, "")
    if read and read == write:
        raise typer.BadParameter(f"{VIEW_TOKEN_VARIABLE} and {TOKEN_VARIABLE} are the same")
    return Tokens(write or secrets.token_urlsafe(24), read), not write
