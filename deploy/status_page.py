"""The page of `penstock status`: a run's state (`report.run_state`) as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

GROUPS = ("queued", "admitted", "ready", "shipped", "trained")


def draw_state(state: dict[str, Any]) -> RenderableType:
    """For `rich` to print."""
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
