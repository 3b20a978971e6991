"""Reports a run's progress: on the terminal, in ``roles.json`` for other processes, and as one mapping (`run_state`).

The reporter reads metrics.jsonl, the queue's status and its registry once a second, and passes them to the watchdog.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from penstock.common import JsonlTail, rewrite_jsonl
from penstock.dashboard import Pulse, RunFiles, advise, flat, flat_rewards, rollout_idle
from penstock.deploy.config import RunConfig
from penstock.deploy.lives import LivesFile
from penstock.deploy.plan import lent_servers
from penstock.deploy.run_dir import RunDir
from penstock.deploy.supervisor import KillerCheck, StalledRun, SupervisedRole, VersionRefused, Watchdog
from penstock.transfer_queue import QueueError, ServerInfo, Status, TransferQueue

__all__ = ["Reporter", "StalledRun", "VersionRefused", "describe"]


class Reporter:
    """Draws a progress bar on a terminal, or prints one line per step elsewhere."""

    def __init__(
        self,
        config: RunConfig,
        run: RunDir,
        queue: TransferQueue,
        members: Sequence[SupervisedRole],
        lives: LivesFile,
        *,
        found: str = "",
        forgive_workers: Callable[[], None] = lambda: None,
    ) -> None:
        """`found`: what the run continues from; empty for a new one. `forgive_workers`: see `KillerCheck`."""
        self._console = Console(stderr=True, highlight=False)
        self._config = config
        self._run = run
        self._queue = queue
        self._roles = RolesFile(run.roles, members)
        self._members, self._lives = members, lives
        self._watchdog = Watchdog(config, members, self._say)
        self._killers = KillerCheck(forgive_workers)
        self._metrics = JsonlTail(run.metrics)
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT_STEPS)
        self._said_flat = False
        self._unrecorded = ""
        self.steps_done = 0
        self._bar: Progress | None = None
        if self._console.is_terminal:
            self._bar = _progress_bar(self._console)
            self._bar.start()
            self._task = self._bar.add_task("starting", total=config.trainer.steps)
        self._say(f"run {config.name}: {describe(config)}")
        self._say(f"  folder: {run.root}")
        if found:
            self._say(f"  found: {found}")
        if config.dashboard.enabled:
            where = f"port {config.dashboard.port}" if config.dashboard.port else "its port is in logs/dashboard.log"
            self._say(f"  page: {config.dashboard.host}, {where}; its token is PENSTOCK_TOKEN in connect.env")

    async def run(self) -> None:
        """Until cancelled; raises `StalledRun`, `VersionRefused`."""
        while True:
            await asyncio.sleep(1.0)
            status, servers = await self._ask()
            self._report(status)
            if status is not None:
                self._killers.look(status)
            await self._watchdog.look(self.steps_done, status, servers)

    def _report(self, status: Status | None) -> None:
        """A full or missing disk does not end the run: the error is reported once, and the write is retried."""
        found = ""
        try:
            self._show(self._metrics.lines(), status)
            self._roles.write()
            self._lives.write(restarts_of(self._members))
        except OSError as error:
            found = f"  not recorded: {error}"
            if found != self._unrecorded:
                self._say(found)
        self._unrecorded = found

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._roles.remove()

    async def _ask(self) -> tuple[Status | None, list[ServerInfo]]:
        try:
            return await self._queue.status(), await self._queue.servers()
        except QueueError as error:
            self._say(f"  queue: {error}")
            return None, []

    def _show(self, rows: Iterable[dict[str, Any]], status: Status | None) -> None:
        for row in rows:
            if row["step"] >= self.steps_done:  # a replayed step was reported before
                self._say_step(row)
                self.steps_done = row["step"] + 1
                self._say_flat(row)
        if self._bar is not None:
            self._bar.update(self._task, completed=self.steps_done, description=_pipeline(status))

    def _say_step(self, row: dict[str, Any]) -> None:
        self._say(
            f"  step {row['step'] + 1:>3}/{self._config.trainer.steps}  reward {row['reward']:.3f}  "
            f"staleness {row['staleness_mean']:.2f} (max {row['staleness_max']})  tokens {row['tokens']}  "
            f"train {row['train_s']:.1f} s  waited {row['wait_s']:.1f} s"
        )

    def _say_flat(self, row: dict[str, Any]) -> None:
        """Once for each stretch of steps whose rewards are all equal."""
        self._recent.append(row)
        warning = flat_rewards(self._recent)
        if warning and not self._said_flat:
            self._say(f"  {warning}")
        self._said_flat = bool(warning)

    def _say(self, line: str) -> None:
        console = self._bar.console if self._bar is not None else self._console
        console.print(line, markup=False, soft_wrap=True)
        sys.stderr.flush()


def describe(config: RunConfig) -> str:
    """The meaning of the settings together, in one line."""
    groups = (config.max_staleness + 1) * config.groups_per_step
    own = (source.group_size or config.group_size for source in config.trainer.sources.values())
    of = " or ".join(map(str, sorted({config.group_size, *own})))
    return (
        f"at most {config.max_staleness + 1} x {config.groups_per_step} = {groups} groups of {of} "
        f"episodes in flight; tokens up to {config.max_staleness} versions old; {config.trainer.steps} steps; "
        f"{config.rollout.servers} {config.rollout.engine} server(s), {config.agent.workers} agent worker(s), "
        f"{config.trainer.ranks} trainer rank(s)"
        + (", in turns on the same devices" if config.placement.colocated else "")
        + (f", {lent_servers(config)} more server(s) on the trainer's devices" if config.placement.lend else "")
    )


def _progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def _pipeline(status: Status | None) -> str:
    if status is None:
        return "queue away"
    groups = status.groups
    return (
        f"v{status.version} | {groups.get('admitted', 0)} groups in flight, {groups.get('ready', 0)} ready, "
        f"{groups.get('shipped', 0)} in training"
    )


class RolesFile:
    """``roles.json``, rewritten atomically when something has changed."""

    def __init__(self, path: Path, processes: Sequence[SupervisedRole]) -> None:
        self._path = path
        self._processes = processes
        self._written: dict[str, Any] = {}

    def write(self) -> None:
        now = {p.spec.name: {"state": p.state, "restarts": p.restarts} for p in self._processes}
        if now != self._written:
            rewrite_jsonl(self._path, [now])
            self._written = now

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def restarts_of(members: Iterable[SupervisedRole]) -> dict[str, int]:
    """Role to how often it was started again, in this life of the run."""
    return {member.spec.name: member.restarts for member in members}


def read_roles(path: Path) -> dict[str, dict[str, Any]]:
    """Role → ``state`` and ``restarts``; empty where the run has no such file."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        found: dict[str, dict[str, Any]] = json.loads(path.read_text())
        return found
    return {}


RECENT_STEPS = 10
Row = Mapping[str, Any]


async def run_state(files: RunFiles, run: str, pulse: Pulse) -> dict[str, Any]:
    """Serialisable as JSON; unknown values are None."""
    live = await pulse.of(run)
    config, rows = flat(files.config()), files.metrics.rows()
    status: Row = live.get("status", {})
    split = advise(rows, rollout_idle(files, rows, live.get("status")), files.devices)  # as the page does
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
        **_queue_facts(status),
        "bound_groups": _bound(config),
        "servers": servers,
        "waiting": who_waits(status, servers, config) if live["alive"] else [],
        "advice": split.advice,
        "warning": "; ".join(filter(None, (split.warning, refusals(servers)))) or None,
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


def _queue_facts(status: Row) -> dict[str, Any]:
    names = ("version", "committed_step", "groups", "episodes", "workers", "waits_s", "ages_s", "unconsumed_bytes")
    return {name: status.get(name) for name in names}


def _roles(root: Path) -> dict[str, dict[str, Any]]:
    """Of this machine; those of a run that ended have restarts alone."""
    ended = _json_of(root / "summary.json").get("restarts", {})
    return read_roles(root / "roles.json") or {name: {"state": "ended", "restarts": n} for name, n in ended.items()}


def _eta_s(rows: Sequence[Row], done: int, steps: int | None) -> float | None:
    """At the speed of the newest steps; the first includes the start-up and counts only while it is the only one."""
    step_s = _mean(rows[1:][-RECENT_STEPS:] or rows, "wall_s")
    return None if step_s is None or steps is None else round(step_s * max(0, steps - done), 1)


def _bound(config: Row) -> int | None:
    """Maximum number of admitted groups."""
    staleness, groups = config.get("max_staleness"), config.get("groups_per_step")
    return None if staleness is None or groups is None else (int(staleness) + 1) * int(groups)


def who_waits(status: Row, servers: Sequence[Row], config: Row) -> list[str]:
    """One line for the trainer and one for the agent workers: what they do or wait for."""
    return [_training(status, config), _rolling_out(status, servers, config)]


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
    """Of servers that could not load the newest version; empty where there are none."""
    return "; ".join(f"{server['server_id']}: {server['refusal']}" for server in servers if server["refusal"])


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
