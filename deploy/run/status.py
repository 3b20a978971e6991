"""`penstock status`: a run's state as one mapping (`run_state`), and as lines for a terminal (`draw_state`); all runs
of a folder (`list_runs`, `draw_runs`)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from penstock.dashboard import Pulse, RunFiles, advise, flat, rollout_idle
from penstock.deploy.run.accounts import shares
from penstock.deploy.run_dir import EVALUATION_SETTINGS, RunDir

RECENT_STEPS = 10
Row = Mapping[str, Any]


async def run_state(files: RunFiles, run: str, pulse: Pulse) -> dict[str, Any]:
    """Serialisable as JSON; values that are unknown, or that a fine-tuning lacks, are None."""
    live = await pulse.of(run)
    config, rows = flat(files.config()), files.metrics.rows()
    status: Row = live.get("status", {})
    split = advise(rows, rollout_idle(files, rows, live.get("status")), files.devices)  # as the page does
    steps = config.get("trainer.steps")
    done = max(len(rows), int(status.get("version", 0)))
    alive = live["alive"] or RunDir(files.root).is_alive()
    servers, end = live.get("servers", []), files.end()
    summary = end["summary"]
    ended_roles = {
        name: {"state": "failed" if name in summary.get("roles_failed", ()) else "ended", "restarts": n}
        for name, n in summary.get("restarts", {}).items()
    }
    learning = _learning(rows)
    facts = ("version", "committed_step", "groups", "episodes", "workers", "waits_s", "ages_s", "unconsumed_bytes")
    return {
        "run": run,
        "alive": live["alive"],
        "cause": None if live["alive"] else live["cause"],
        "ended": end["ended"],
        "state": state_of_run(end, alive=alive),
        "step": done,
        "steps": steps,
        "eta_s": _eta_s(rows, done, steps) if alive else None,
        "quiet_s": round(files.quiet_s, 1) if rows else None,
        **learning,
        "trainer_waits": split.bubble,
        **{name: status.get(name) for name in facts},
        "bound_groups": _bound(config),
        "accounts": files.json_of("accounts.json").get("accounts", {}),
        "servers": servers,
        "waiting": [_training(status, config), _rolling_out(status, servers, config)] if live["alive"] else [],
        "advice": split.advice if learning["loss"] is None else None,
        "warning": "; ".join(filter(None, (split.warning, refusals(servers)))) or None,
        "roles": files.json_of("roles.json") or ended_roles,
    }


def _learning(rows: Sequence[Row]) -> dict[str, Any]:
    """Return rewards, staleness and speed of the newest steps; `loss` of a fine-tuning, whose steps have no reward."""
    recent = rows[-RECENT_STEPS:]
    last = recent[-1] if recent else {}
    return {
        "reward": last.get("reward"),
        "loss": last.get("loss") if "reward" not in last else None,
        "reward_recent": _mean(recent, "reward"),
        "staleness_mean": _mean(recent, "staleness_mean"),
        "staleness_max": max((row["staleness_max"] for row in recent if "staleness_max" in row), default=None),
        "tokens_per_s": _mean(recent, "tokens_per_s"),
        "step_s": _mean(recent, "wall_s"),
        "faults": last.get("faults") or {},
    }


def _eta_s(rows: Sequence[Row], done: int, steps: int | None) -> float | None:
    """At the speed of the newest steps; the first includes the start-up and counts only while it is the only one."""
    step_s = _mean(rows[1:][-RECENT_STEPS:] or rows, "wall_s")
    return None if step_s is None or steps is None else round(step_s * max(0, steps - done), 1)


def _bound(config: Row) -> int | None:
    """Maximum number of admitted groups."""
    staleness, groups = config.get("max_staleness"), config.get("groups_per_step")
    return None if staleness is None or groups is None else (int(staleness) + 1) * int(groups)


def _training(status: Row, config: Row) -> str:
    groups, needed = status["groups"], config.get("groups_per_step") or "?"
    if groups.get("shipped"):
        return f"trainer: trains {groups['shipped']} of {needed} groups per step"
    oldest_s = status["ages_s"].get("admitted")
    age = f"; the oldest of {groups.get('admitted', 0)} in flight is {oldest_s:.0f} s old" if oldest_s else ""
    return f"trainer: waits for groups, {groups.get('ready', 0)} of {needed} are ready{age}"


def _rolling_out(status: Row, servers: Sequence[Row], config: Row) -> str:
    groups, leased = status["groups"], status["episodes"].get("leased", 0)
    in_system = sum(groups.get(name, 0) for name in ("admitted", "ready", "shipped"))
    if not any(server["accepting"] for server in servers):
        return f"agent workers: wait for a rollout server, none of {len(servers)} accepts requests"
    if leased:
        requests = sum(server["in_flight"] for server in servers)
        return f"agent workers: run {leased} episodes, {requests} requests are in flight"
    if not groups.get("queued"):
        return "agent workers: wait for tasks, none is queued"
    bound = _bound(config)
    if bound is not None and in_system >= bound:
        return f"agent workers: wait for the trainer, {in_system} of {bound} groups are in the system (max_staleness)"
    return f"agent workers: idle while {groups['queued']} groups are queued"


def refusals(servers: Sequence[Row]) -> str:
    """Return the reasons of servers that could not load the newest version; empty if there are none."""
    return "; ".join(f"{server['server_id']}: {server['refusal']}" for server in servers if server["refusal"])


def _mean(rows: Sequence[Row], name: str) -> float | None:
    values = [row[name] for row in rows if isinstance(row.get(name), int | float)]
    return fmean(values) if values else None


GROUPS = ("queued", "admitted", "ready", "shipped", "trained")


def draw_state(state: dict[str, Any]) -> RenderableType:
    """Return the state as a table for `rich`."""
    page = Table.grid(padding=(0, 0))
    headline = Text(f"{state['run']}  ", style="bold")
    headline.append(state["state"], style="green" if state["state"] in ("running", "finished") else "yellow")
    headline.append(f"  step {state['step']} of {_or_dash(state['steps'])}", style="none")
    if state["eta_s"] is not None:
        headline.append(f"  about {_time(state['eta_s'])} left", style="none")
    page.add_row(headline)
    for line in _lines(state):
        page.add_row(Text(line))
    if state["servers"]:
        page.add_row(_servers(state["servers"]))
    return page


def _lines(state: dict[str, Any]) -> Iterator[str]:
    if state["ended"]:
        yield f"ended     {state['ended']}"
    elif state["state"] != "running":
        yield f"ended     interrupted or killed, --resume continues it; {state['cause']}"
    elif not state["alive"] and state["loss"] is None:
        yield f"queue     {state['cause']}"
    last = "no step yet" if state["quiet_s"] is None else f"the last step was {_time(state['quiet_s'])} ago"
    speed = f"speed     {_number(state['tokens_per_s'], 0)} trained tokens/s, {_number(state['step_s'], 1)} s per step"
    if state["loss"] is None:
        yield (
            f"learning  reward {_number(state['reward'])}; of the newest steps {_number(state['reward_recent'])}, "
            f"staleness {_number(state['staleness_mean'])} on average and {_or_dash(state['staleness_max'])} at most"
        )
        yield f"{speed}; {last}"
        yield f"trainer   {_share(state['trainer_waits'])} of the newest steps' time without a batch"
    else:
        yield f"learning  loss {_number(state['loss'], 4)}"
        yield f"{speed}; {last}"
    if state["faults"]:
        yield f"faults    of the newest step: {', '.join(f'{cause} ({n})' for cause, n in state['faults'].items())}"
    if state["groups"] is not None:
        queue = " → ".join(f"{name} {state['groups'].get(name, 0)}" for name in GROUPS)
        yield f"groups    {queue}   (at most {_or_dash(state['bound_groups'])} from admitted to shipped)"
        yield from (f"{'now' if index == 0 else '':8}  {line}" for index, line in enumerate(state["waiting"]))
        yield f"waits     {_pairs(state['waits_s'], ' s')}"
        yield f"workers   {_pairs(state['workers'], ' episodes')}"
    yield from _account_lines(state["accounts"])
    if state["roles"]:
        listed = (f"{name} {role['state']}" + (f", {n} restarts" if (n := role["restarts"]) else "")
                for name, role in state["roles"].items())  # fmt: skip
        yield f"roles     {'; '.join(listed)}"
    if state["advice"]:
        yield f"advice    {state['advice']}"
    if state["warning"]:
        yield f"warning   {state['warning']}"


def _account_lines(accounts: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    if accounts:
        yield "accounts  since the start; rollout_s and trainer_s are GPU time, of a role without GPUs its CPU time"
    yield from (f"{resource:9} {shares(amounts)}" for resource, amounts in accounts.items())


def _servers(servers: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("server", "version", "behind", "in flight", "takes requests", "heard of", "address"):
        table.add_column(column)
    for one in servers:
        takes = "evaluations" if one["evaluates"] else "yes" if one["accepting"] else "no"
        numbers = (str(one["version"]), str(one["lag"]), str(one["in_flight"]))
        table.add_row(Text(one["server_id"]), *numbers, takes, f"{one['age_s']:.1f} s ago", Text(one["url"]))
    return table


def list_runs(folder: Path) -> list[dict[str, Any]]:
    """Return a line per run of a folder of runs, newest first; ``quiet_s`` is the time since the last step.

    Evaluations have no steps: ``step`` and ``steps`` are None.
    """
    configs = sorted(folder.glob("*/config.yaml"), key=lambda file: file.stat().st_mtime, reverse=True)
    return [_line_of(file.parent) for file in configs]


def _line_of(root: Path) -> dict[str, Any]:
    run, files = RunDir(root), RunFiles(root)
    line, written = files.overview(), None
    if line["written_unix_s"] is not None:
        written = round(max(0.0, time.time() - line["written_unix_s"]), 1)
    state = state_of_run(files.end(), alive=run.is_alive(), evaluated=(root / "eval.json").exists())
    facts = {"step": line["steps"], "steps": line["steps_planned"], "reward": line["reward"]}
    if (root / EVALUATION_SETTINGS).exists():
        facts |= {"step": None, "steps": None}
    return {"run": root.name, "state": state, **facts, "quiet_s": written}


def state_of_run(end: Row, *, alive: bool, evaluated: bool = False) -> str:
    """One word for a run. `end`: see `RunFiles.end`; `evaluated`: it is an evaluation, and whole."""
    if alive:
        return "running"
    if end["failed"]:
        return "failed"
    return "finished" if end["ended"] or evaluated else "interrupted"


def draw_runs(runs: Sequence[Row]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("run", "state", "step", "reward", "last step"):
        table.add_column(column)
    for one in runs:
        age = "–" if one["quiet_s"] is None else f"{_time(one['quiet_s'])} ago"
        step = "evaluation" if one["step"] is None else f"{one['step']} of {_or_dash(one['steps'])}"
        table.add_row(Text(one["run"]), one["state"], step, _number(one["reward"]), age)
    return table


def _pairs(values: dict[str, float], unit: str) -> str:
    return ", ".join(f"{name} {value:.0f}{unit}" for name, value in sorted(values.items())) or "none"


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
