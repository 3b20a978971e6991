"""`penstock status`: a run in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.deploy.commands.shared import RUNS, AsJson, RunsDir, refuse

EVERY_S = 1.0


def status(
    run: Annotated[
        str | None, typer.Argument(help="Name of a run, or its folder [PENSTOCK_RUN].", metavar="RUN")
    ] = None,
    runs_dir: RunsDir = RUNS,
    *,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second, until the run ends or Ctrl-C.")] = False,
) -> None:
    """Show what a run is doing: what waits for what, queues, servers, staleness, reward, restarts, time left. Without a
    name, list the runs.

    Reads the queue of a running run and the folder of a finished one. For a run whose folder is on another machine,
    source its connect.env first: . connect.env; penstock status

    Examples: penstock status calculator --watch
    penstock status runs/mine --json
    """
    from penstock.deploy.run.connection import RUN_VARIABLE

    name = run or os.environ.get(RUN_VARIABLE, "")
    if not name:
        if watch:
            raise typer.BadParameter(f"RUN is missing, and {RUN_VARIABLE} is not set: --watch refreshes one run")
        _list(runs_dir.resolve(), as_json=as_json)
        return
    folder, name = _place(name, runs_dir)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_watch(folder, name) if watch and not as_json else _once(folder, name, as_json=as_json))


def _list(folder: Path, *, as_json: bool) -> None:
    from rich.console import Console

    from penstock.deploy.run.status import draw_runs, list_runs

    runs = list_runs(folder)
    if as_json:
        print(json.dumps({"runs": runs}))
    elif runs:
        Console(highlight=False).print(draw_runs(runs))
    else:
        print(f"{folder}: no runs; start one with `penstock run`, or name another folder: penstock status RUNS/NAME")


def _place(name: str, runs_dir: Path) -> tuple[Path, str]:
    """Folder of the runs, and the run's name."""
    from penstock.deploy.run.connection import RUN_VARIABLE
    from penstock.deploy.run_dir import no_such_run

    path = Path(name)
    folder, name = (path.resolve().parent, path.name) if path.name != name else (runs_dir.resolve(), name)
    if not (folder / name).is_dir() and os.environ.get(RUN_VARIABLE) != name:
        refuse(no_such_run(folder, name))
    return folder, name


async def _once(folder: Path, name: str, *, as_json: bool) -> None:
    async with _looking(folder, name) as look:
        state = await look()
    if as_json:
        print(json.dumps(state))
        return
    from rich.console import Console

    from penstock.deploy.run.status import draw_state

    Console(highlight=False).print(draw_state(state))


async def _watch(folder: Path, name: str) -> None:
    from rich.console import Console
    from rich.live import Live

    from penstock.deploy.run.status import draw_state

    async with _looking(folder, name) as look:
        state = await look()
        with Live(draw_state(state), console=Console(highlight=False), auto_refresh=False) as screen:
            while state["state"] == "running":
                await asyncio.sleep(EVERY_S)
                state = await look()
                screen.update(draw_state(state), refresh=True)


@contextlib.asynccontextmanager
async def _looking(folder: Path, name: str) -> AsyncIterator[Callable[[], Awaitable[dict[str, Any]]]]:
    """Yield a function that returns the run's present state; its connections are closed at the end."""
    from penstock.dashboard import Pulse, RunFiles
    from penstock.deploy.recipe_tree import ConfigError
    from penstock.deploy.run.connection import FolderQueues, RunConnection
    from penstock.deploy.run.status import run_state

    own = None
    with contextlib.suppress(ConfigError):
        own = RunConnection.from_environment()
    queues, files = FolderQueues(folder, own), RunFiles(folder / name)
    pulse = Pulse(queues)
    try:
        yield lambda: run_state(files, name, pulse)
    finally:
        files.close()
        await queues.close()
