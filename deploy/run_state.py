"""What a run is doing, or did: from its folder and, where it lives, its queue. One plain mapping."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from penstock.dashboard import Pulse, RunFiles, advise, flat
from penstock.deploy.roles_file import read_roles

RECENT_STEPS = 10
Row = Mapping[str, Any]


async def run_state(files: RunFiles, run: str, pulse: Pulse) -> dict[str, Any]:
    """JSON can say all of it; what is not known is None."""
    live = await pulse.of(run)
    config, rows = flat(files.config()), files.metrics.rows()
    status: Row = live.get("status", {})
    steps = config.get("trainer.steps")
    done = max(len(rows), int(status.get("version", 0)))
    servers = live.get("servers", [])
    return {
        "run": run,
        "alive": live["alive"],
        "cause": None if live["alive"] else live["cause"],
        "ended": _json_of(files.root / "ended.json").get("why"),
        "step": done,
        "steps": steps,
        "eta_s": _eta_s(rows, done, steps) if live["alive"] else None,
        "quiet_s": round(files.quiet_s, 1) if rows else None,
        **_learning(rows),
        **_pipeline(status),
        "bound_groups": _bound(config),
        "servers": servers,
        "waiting": who_waits(status, servers, config) if live["alive"] else [],
        "advice": advise(rows, None, files.devices).advice,
        "roles": _roles(files.root),
    }


def _learning(rows: Sequence[Row]) -> dict[str, Any]:
    """Of the newest steps."""
    recent = rows[-RECENT_STEPS:]
    last = recent[-1] if recent else {}
    return {
        "reward": last.get("reward"),
        "reward_recent": _mean(recent, "reward"),
        "staleness_mean": _mean(recent, "staleness_mean"),
        "staleness_max": max((row["staleness_max"] for row in recent if "staleness_max" in row), default=None),
        "tokens_per_s": _mean(recent, "tokens_per_s"),
        "step_s": _mean(recent, "wall_s"),
        "trainer_waits": _mean(recent, "bubble"),
    }


def _pipeline(status: Row) -> dict[str, Any]:
    names = ("version", "committed_step", "groups", "episodes", "workers", "waits_s", "ages_s", "unconsumed_bytes")
    return {name: status.get(name) for name in names}


def _roles(root: Path) -> dict[str, dict[str, Any]]:
    """Of this machine; those of a run that ended have restarts alone."""
    ended = _json_of(root / "summary.json").get("restarts", {})
    return read_roles(root / "roles.json") or {name: {"state": "ended", "restarts": n} for name, n in ended.items()}


def _eta_s(rows: Sequence[Row], done: int, steps: int | None) -> float | None:
    """As fast as the newest steps; the first waits for everything to start, and counts only while it is alone."""
    step_s = _mean(rows[1:][-RECENT_STEPS:] or rows, "wall_s")
    return None if step_s is None or steps is None else round(step_s * max(0, steps - done), 1)


def _bound(config: Row) -> int | None:
    """Groups that admission lets be in the system."""
    staleness, groups = config.get("max_staleness"), config.get("groups_per_step")
    return None if staleness is None or groups is None else (int(staleness) + 1) * int(groups)


def who_waits(status: Row, servers: Sequence[Row], config: Row) -> list[str]:
    """A line per half of the run: what it does now, or what it waits for."""
    return [_training(status, config), _rolling_out(status, servers, config)]


def _training(status: Row, config: Row) -> str:
    groups, needed = status["groups"], config.get("groups_per_step") or "?"
    if groups.get("shipped"):
        return f"trainer: works, {groups['shipped']} groups of {needed} per step are with it"
    oldest_s = status["ages_s"].get("admitted")
    told = f"; the oldest of {groups.get('admitted', 0)} in flight is {oldest_s:.0f} s old" if oldest_s else ""
    return f"trainer: waits for groups, {groups.get('ready', 0)} of {needed} are ready{told}"


def _rolling_out(status: Row, servers: Sequence[Row], config: Row) -> str:
    groups, leased = status["groups"], status["episodes"].get("leased", 0)
    in_system = sum(groups.get(name, 0) for name in ("admitted", "ready", "shipped"))
    if not any(server["accepting"] for server in servers):
        return f"agent workers: wait for a rollout server, none of {len(servers)} takes requests"
    if leased:
        requests = sum(server["in_flight"] for server in servers)
        return f"agent workers: run {leased} episodes, {requests} requests are in flight"
    if not groups.get("queued"):
        return "agent workers: wait for tasks, none is queued"
    bound = _bound(config)
    if bound is not None and in_system >= bound:
        return f"agent workers: wait for the trainer, {in_system} of {bound} groups are in the system (max_staleness)"
    return f"agent workers: hold nothing while {groups['queued']} groups are queued"


def _mean(rows: Sequence[Row], name: str) -> float | None:
    values = [row[name] for row in rows if isinstance(row.get(name), int | float)]
    return fmean(values) if values else None


def _json_of(file: Path) -> dict[str, Any]:
    """Empty where there is no such file, or one that is being written."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
