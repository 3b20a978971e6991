"""Reports what a run does while it lives, on the terminal and in roles.json; its end is in `summary`.

The reporter reads metrics.jsonl, the queue's status and its registry once a second, and passes them to the watchdog.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from penstock.agent_loops import BLOCKING
from penstock.common import JsonlTail, rewrite_jsonl
from penstock.dashboard import reward_warning
from penstock.deploy.config import RunConfig
from penstock.deploy.run.accounts import CostAccounts, EndReports, idle_cause
from penstock.deploy.run.console import HeadConsole
from penstock.deploy.run.plan import lent_servers
from penstock.deploy.run.supervisor import SupervisedRole, Watchdog
from penstock.deploy.run_dir import LivesFile, RunDir
from penstock.transfer_queue import QueueError, ServerInfo, Status, TransferQueue

logger = logging.getLogger("penstock.run")


class BudgetSpent(Exception):
    """The run's accounts have cost what `costs.budget` allows: it ends in order."""


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
        summary: str = "",
        forgive_workers: Callable[[], None] = lambda: None,
    ) -> None:
        """`summary`: what the run continues from; empty for a new one. `forgive_workers`: see `Watchdog`."""
        self._console = HeadConsole()
        self._config = config
        self._run = run
        self._queue = queue
        self._members, self._lives = members, lives
        self._roles: dict[str, Any] = {}
        """Content of roles.json, which is rewritten when it changes."""
        self._watchdog = Watchdog(config, members, self._say, forgive_workers)
        self._metrics, self._evaluations = JsonlTail(run.metrics), JsonlTail(run.evaluations)
        self._rows: list[dict[str, Any]] = []
        """The metrics of each step of this life that `reward_warning` reads."""
        self._warned = False
        self._problems: set[str] | None = None if summary else set()
        """Waits for blocking user code and causes of failed attempts that were reported; None: those that the first
        status has are an earlier life's."""
        self._unrecorded = ""
        self._accounts = CostAccounts(run.accounts)
        self.ends = EndReports(members, run.logs, in_turns=config.placement.in_turns)
        self.steps_done = 0
        counts, times = (BarColumn(), MofNCompleteColumn()), (TimeElapsedColumn(), TimeRemainingColumn())
        columns = (TextColumn("{task.description}"), *counts, *times)
        self._bar = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._bar.start()
        self._task = self._bar.add_task("starting", total=config.trainer.steps)
        self._say(f"run {config.name}: {describe(config)}")
        self._say(f"  folder: {run.root}")
        if summary:
            self._say(f"  found: {summary}")
            self.steps_done = max((row["step"] + 1 for row in self._metrics.lines()), default=0)
            self._evaluations.read()  # an earlier life reported them
        if config.dashboard.enabled:
            port = config.dashboard.port
            host = socket.gethostname() if config.dashboard.host in ("0.0.0.0", "::") else config.dashboard.host  # noqa: S104
            where = f"http://{host}:{port}/" if port else f"address in {run.logs / 'dashboard.log'}"
            self._say(f"  dashboard: {where} (sign in with PENSTOCK_TOKEN of {run.connect_env})")

    async def run(self) -> None:
        """Until cancelled; raises `StalledRun`, `VersionRefused`, `BudgetSpent`."""
        while True:
            await asyncio.sleep(1.0)
            status, servers = await self._ask()
            self._report(status)
            if status is not None:
                try:
                    await self.ends.send(self._queue)
                    await self._accounts.follow(self._queue, idle_cause(status, self._config))
                except (QueueError, OSError) as error:
                    logger.warning("accounts of cost: %s", error)
                cost, budget = sum(self._accounts.cost(self._config.costs).values()), self._config.costs.budget
                if budget is not None and cost >= budget:
                    raise BudgetSpent(f"the budget is spent: {cost:.4g} of {budget:g} (costs.budget)")
            await self._watchdog.look(self.steps_done, status, servers)

    def _report(self, status: Status | None) -> None:
        """A full or missing disk does not end the run: the error is reported once, and the write is retried."""
        problem = ""
        try:
            self._show(self._metrics.lines(), status)
            for row in self._evaluations.lines():
                self._say(f"  evaluation after step {row['version']}: {_evaluation(row)}")
            roles = {m.spec.name: {"state": m.state, "restarts": m.restarts} for m in self._members}
            if roles != self._roles:
                rewrite_jsonl(self._run.roles, [roles])
                self._roles = roles
            self._lives.write(restarts_of(self._members))
        except OSError as error:
            problem = f"  not recorded: {error}"
            if problem != self._unrecorded:
                self._say(problem)
        self._unrecorded = problem

    def close(self) -> None:
        self._report(None)  # steps that the trainer ended while it was stopped
        self._bar.stop()
        self._run.roles.unlink(missing_ok=True)

    async def _ask(self) -> tuple[Status | None, list[ServerInfo]]:
        try:
            return await self._queue.status(), await self._queue.servers()
        except QueueError as error:
            self._say(f"  queue: {error}")
            return None, []

    def _show(self, rows: Iterable[dict[str, Any]], status: Status | None) -> None:
        for row in rows:
            if row["step"] < self.steps_done:  # a replayed step was reported before
                continue
            self._say(f"  step {row['step'] + 1:>3}/{self._config.trainer.steps}  {_figures(row)}{_faults(row)}")
            self._remember(row)
            warning = reward_warning(self._rows)
            if warning and not self._warned:  # once for each stretch of such steps
                self._say(f"  {warning}")
            self._warned = bool(warning)
        pipeline = "queue away"
        if status is not None:
            self._show_problems(status)
            groups = Counter(status.groups)
            pipeline = (
                f"v{status.version} | {groups['admitted']} groups in flight, {groups['ready']} ready, "
                f"{groups['shipped']} in training"
            )
        self._bar.update(self._task, completed=self.steps_done, description=pipeline)

    def _show_problems(self, status: Status) -> None:
        """Each problem once, also before the first step."""
        problems = {*status.waits_s, *status.failures}
        if self._problems is None:
            self._problems = problems
        for problem in sorted(problems - self._problems):
            if problem in status.failures:
                self._say(f"  an episode failed and is tried again: {problem}")
            elif problem.startswith(f"agent:{BLOCKING}"):
                place = problem.removeprefix(f"agent:{BLOCKING}")
                self._say(f"  {place} blocks every episode of its worker: await the call, or use asyncio.to_thread")
        self._problems |= problems

    def _remember(self, row: Mapping[str, Any]) -> None:
        self.steps_done = max(self.steps_done, row["step"] + 1)
        facts = ("reward", "reward_std", "episodes", "faults", "attempts_failed")
        if row["episodes"]:
            self._rows.append({name: row[name] for name in facts if name in row})

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)


def _figures(row: Mapping[str, Any]) -> str:
    """The figures of a step, for its line."""
    if not row["episodes"]:
        return "no episode could be trained on"
    return (
        f"reward {row['reward']:.3f}  staleness {row['staleness_mean']:.2f} (max {row['staleness_max']})  "
        f"tokens {row['tokens_sampled']}  train {row['train_s']:.1f} s  waited {row['wait_s']:.1f} s"
    )


def _evaluation(row: Mapping[str, Any]) -> str:
    """The figures of an evaluation, for its line."""
    reward = f"reward {row['reward']:.3f} over {row['episodes']:.0f} episodes" if "reward" in row else "no reward"
    return reward + (f"; {row['failed']:.0f} more failed" if row["failed"] else "")


def _faults(row: Mapping[str, Any]) -> str:
    """The two commonest faults of a step's episodes, for the end of its line; empty if there is none."""
    faults = Counter(row.get("faults", {})).most_common(2)
    return f"  faults: {', '.join(f'{cause} ({count})' for cause, count in faults)}" if faults else ""


def describe(config: RunConfig) -> str:
    """The meaning of the settings together, in one line."""
    groups = (config.max_staleness + 1) * config.groups_per_step
    own = (source.group_size or config.group_size for source in config.trainer.sources.values())
    of = " or ".join(map(str, sorted({config.group_size, *own})))
    return (
        f"{config.trainer.steps} steps of {config.groups_per_step} tasks, each tried in {of} episodes; episodes of "
        f"at most {groups} tasks in flight (max_staleness {config.max_staleness}); "
        f"{counted(config.rollout.servers, config.rollout.engine + ' server')}, "
        f"{counted(config.agent.workers, 'agent worker')}, {counted(config.trainer.ranks, 'trainer rank')}"
        + (", in turns on the same devices" if config.placement.colocated else "")
        + (f", {counted(lent_servers(config), 'server')} on the trainer's devices" if config.placement.lend else "")
    )


def counted(number: int, noun: str) -> str:
    """``1 agent worker``, ``2 agent workers``"""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def restarts_of(members: Iterable[SupervisedRole]) -> dict[str, int]:
    """Role to how often it was started again, in this life of the run."""
    return {member.spec.name: member.restarts for member in members}
