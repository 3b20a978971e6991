"""`penstock status`: a run in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

EVERY_S = 1.0
GROUPS = ("queued", "admitted", "ready", "shipped", "trained")
console = Console(highlight=False)


def status(
    run: Annotated[
        str | None, typer.Argument(help="Name of a run, or its folder [PENSTOCK_RUN].", metavar="[RUN]")
    ] = None,
    runs_dir: Annotated[Path, typer.Option(help="Folder that holds the runs.")] = Path("runs"),
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second, until the run ends or Ctrl-C.")] = False,
) -> None:
    """Show what a run is doing: what waits for what, queues, servers, staleness, reward, restarts, time left.

    Reads the queue of a running run and the folder of a finished one. For a run whose folder is on another machine,
    source its connect.env first: . connect.env; penstock status

    Examples: penstock status calculator --watch
    penstock status runs/mine --json
    """
    folder, name = _place(run, runs_dir)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_watch(folder, name) if watch and not as_json else _once(folder, name, as_json=as_json))


def _place(run: str | None, runs_dir: Path) -> tuple[Path, str]:
    """Folder of the runs, and the run's name."""
    from penstock.deploy.connection import RUN_VARIABLE
    from penstock.deploy.run_dir import no_such_run

    name = run or os.environ.get(RUN_VARIABLE, "")
    if not name:
        raise typer.BadParameter(f"RUN is missing, and {RUN_VARIABLE} is not set")
    given = Path(name)
    folder, name = (given.resolve().parent, given.name) if given.name != name else (runs_dir.resolve(), name)
    if not (folder / name).is_dir() and os.environ.get(RUN_VARIABLE) != name:
        typer.secho(no_such_run(folder, name), fg="red", err=True)
        raise typer.Exit(2)
    return folder, name


async def _once(folder: Path, name: str, *, as_json: bool) -> None:
    async with _looking(folder, name) as look:
        state = await look()
    if as_json:
        print(json.dumps(state))
    else:
        console.print(_drawn(state))


async def _watch(folder: Path, name: str) -> None:
    async with _looking(folder, name) as look:
        state = await look()
        with Live(_drawn(state), console=console, auto_refresh=False) as screen:
            while state["alive"]:
                await asyncio.sleep(EVERY_S)
                state = await look()
                screen.update(_drawn(state), refresh=True)


@contextlib.asynccontextmanager
async def _looking(folder: Path, name: str) -> AsyncIterator[Callable[[], Awaitable[dict[str, Any]]]]:
    """What asks for the run's state, as often as it is called; what it holds open is closed."""
    from penstock.dashboard import Pulse, RunFiles
    from penstock.deploy.config import ConfigError
    from penstock.deploy.connection import RunConnection
    from penstock.deploy.live_queues import FolderQueues
    from penstock.deploy.report import run_state

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


# drawing ------------------------------------------------------------------------------------------------------------
def _drawn(state: dict[str, Any]) -> RenderableType:
    page = Table.grid(padding=(0, 0))
    page.add_row(_headline(state))
    for line in _lines(state):
        page.add_row(Text(line))
    if state["servers"]:
        page.add_row(_servers(state["servers"]))
    return page


def _headline(state: dict[str, Any]) -> Text:
    line = Text(f"{state['run']}  ", style="bold")
    line.append("alive" if state["alive"] else "not alive", style="green" if state["alive"] else "yellow")
    line.append(f"  step {state['step']} of {_or_dash(state['steps'])}", style="none")
    if state["eta_s"] is not None:
        line.append(f"  about {_time(state['eta_s'])} left", style="none")
    return line


def _lines(state: dict[str, Any]) -> Iterator[str]:
    if state["ended"] or not state["alive"]:
        yield f"ended     {state['ended'] or state['cause']}"
    yield (
        f"learning  reward {_number(state['reward'])} (mean of the newest {_number(state['reward_recent'])}), "
        f"staleness {_number(state['staleness_mean'])} (most {_or_dash(state['staleness_max'])})"
    )
    last = "no step yet" if state["quiet_s"] is None else f"the last step was {_time(state['quiet_s'])} ago"
    yield (
        f"speed     {_number(state['tokens_per_s'], 0)} trained tokens/s, {_number(state['step_s'], 1)} s per step, of "
        f"which the trainer waits {_share(state['trainer_waits'])}; {last}"
    )
    if state["groups"] is not None:
        queue = " → ".join(f"{name} {state['groups'].get(name, 0)}" for name in GROUPS)
        yield f"groups    {queue}   (at most {_or_dash(state['bound_groups'])} from admitted to shipped)"
        yield from (f"{'now' if index == 0 else '':8}  {line}" for index, line in enumerate(state["waiting"]))
        yield f"waits     {_pairs(state['waits_s'], ' s')}"
        yield f"workers   {_pairs(state['workers'], ' episodes')}"
    if state["roles"]:
        listed = (f"{name} {role['state']}" + (f", {n} restarts" if (n := role["restarts"]) else "")
                for name, role in state["roles"].items())  # fmt: skip
        yield f"roles     {'; '.join(listed)}"
    yield f"advice    {state['advice']}"
    if state["warning"]:
        yield f"warning   {state['warning']}"


def _servers(servers: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("server", "version", "behind", "in flight", "takes requests", "heard of", "address"):
        table.add_column(column)
    for one in servers:
        takes = "evaluations" if one["evaluates"] else "yes" if one["accepting"] else "no"
        numbers = (str(one["version"]), str(one["lag"]), str(one["in_flight"]))
        table.add_row(Text(one["server_id"]), *numbers, takes, f"{one['age_s']:.1f} s ago", Text(one["url"]))
    return table


def _pairs(found: dict[str, float], unit: str) -> str:
    return ", ".join(f"{name} {value:.0f}{unit}" for name, value in sorted(found.items())) or "none"


def _number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _or_dash(value: object) -> str:
    return "–" if value is None else str(value)


def _time(seconds: float) -> str:
    for unit, size in (("s", 60), ("min", 60)):
        if seconds < 2 * size:
            return f"{seconds:.0f} {unit}"
        seconds /= size
    return f"{seconds:.1f} h"
