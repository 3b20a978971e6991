"""What a person sees while a run goes on, and what other processes may read: ``roles.json``.

The reporter consumes metrics.jsonl, the queue's status and its registry once a second; it is woken by nothing else.
What it has read, the watchdog judges.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from penstock.deploy.config import RunConfig
from penstock.deploy.crew import Member
from penstock.deploy.roles_file import RolesFile
from penstock.deploy.run_dir import RunDir
from penstock.deploy.watchdog import StalledRun, Watchdog
from penstock.trainer import LineTail
from penstock.transfer_queue import QueueError, ServerInfo, Status, TransferQueue

__all__ = ["Reporter", "StalledRun", "describe"]


class Reporter:
    """Draws one progress bar on a terminal, or prints one line per step elsewhere."""

    def __init__(self, config: RunConfig, run: RunDir, queue: TransferQueue, members: Sequence[Member]) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._config = config
        self._run = run
        self._queue = queue
        self._roles = RolesFile(run.roles, members)
        self._watchdog = Watchdog(config, members, self._say)
        self._metrics = LineTail(run.metrics)
        self.steps_done = 0
        self._bar: Progress | None = None
        if self._console.is_terminal:
            self._bar = _progress_bar(self._console)
            self._bar.start()
            self._task = self._bar.add_task("starting", total=config.trainer.steps)
        self._say(f"run {config.name}: {describe(config)}")
        self._say(f"  everything it leaves: {run.root}")
        if config.dashboard.enabled:
            where = f"port {config.dashboard.port}" if config.dashboard.port else "a port told in logs/dashboard.log"
            self._say(f"  page: {config.dashboard.host}, {where}; its token is PENSTOCK_TOKEN in connect.env")

    async def run(self) -> None:
        """Until cancelled; raises `StalledRun`."""
        while True:
            await asyncio.sleep(1.0)
            status, servers = await self._ask()
            self._show(self._metrics.read(), status)
            self._roles.write()
            await self._watchdog.look(self.steps_done, status, servers)

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

    def _show(self, rows: list[dict[str, Any]], status: Status | None) -> None:
        for row in rows:
            if row["step"] >= self.steps_done:  # a replayed step was told before
                self._say_step(row)
                self.steps_done = row["step"] + 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self.steps_done, description=_pipeline(status))

    def _say_step(self, row: dict[str, Any]) -> None:
        self._say(
            f"  step {row['step'] + 1:>3}/{self._config.trainer.steps}  reward {row['reward']:.3f}  "
            f"staleness {row['staleness_mean']:.2f} (max {row['staleness_max']})  tokens {row['tokens']}  "
            f"train {row['train_s']:.1f} s  waited {row['wait_s']:.1f} s"
        )

    def _say(self, line: str) -> None:
        console = self._bar.console if self._bar is not None else self._console
        console.print(line, markup=False, soft_wrap=True)
        sys.stderr.flush()


def describe(config: RunConfig) -> str:
    """What the knobs mean together, in one line."""
    groups = (config.max_staleness + 1) * config.groups_per_step
    return (
        f"at most {config.max_staleness + 1} x {config.groups_per_step} = {groups} groups of {config.group_size} "
        f"episodes in flight; tokens up to {config.max_staleness} versions old; {config.trainer.steps} steps; "
        f"{config.rollout.servers} {config.rollout.engine} server(s), {config.agent.workers} agent worker(s), "
        f"{config.trainer.ranks} trainer rank(s)"
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
