"""`penstock eval`: episodes of a dataset, through the servers, workers, loops and queue of a run without a trainer.

    lock the folder ─► model folder ─► queue ─► rollout servers, agent workers (`supervisor`)
                                        ▲              │ episodes of split eval-N
    parts not recorded ── submit ───────┘              ▼
    eval.json, table ◄─ episodes.jsonl, trajectories/ ◄─ results, part by part

Tasks: the supervisor (ends where a role fails for good), the watchdog (once a second: does anything move?), the
collector (submits parts ahead of the workers, records those that are done), and what ends with the queue or Ctrl-C. The
first that ends, ends the command. Killed at any point and started again, it runs what episodes.jsonl lacks; its queue
keeps the journals of episodes that were under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from penstock.agent_loops.chat import load_tokenizer
from penstock.common import FileLock, write_atomically
from penstock.dashboard import flat
from penstock.deploy.config import RunConfig
from penstock.deploy.evaluation.episodes import EpisodeResult, Part, ResultsFile, parts_of, result_of, task_of
from penstock.deploy.evaluation.report import table_of, write_report
from penstock.deploy.evaluation.target import EvalPlan, EvalRequest, export_model, resolve_target
from penstock.deploy.preflight.suite import evaluation_checks, refuse_doomed
from penstock.deploy.recipe_tree import ConfigError
from penstock.deploy.run.connection import RedisLost, RunConnection
from penstock.deploy.run.console import HeadConsole
from penstock.deploy.run.launcher import Interrupted, open_run, until_interrupted
from penstock.deploy.run.plan import agent_role, rollout_role
from penstock.deploy.run.processes import RoleFailed
from penstock.deploy.run.supervisor import LocalPlacement, StalledRun, Supervisor, Watchdog
from penstock.deploy.run_dir import EVALUATION_SETTINGS, RunDir
from penstock.trainer import DataError
from penstock.transfer_queue import QueueError, QueueUnavailable, TransferQueue

POLL_S = 0.25
LINE_S = 5.0
"""Between two lines if standard error is not a terminal."""
logger = logging.getLogger("penstock.eval")


def evaluate_target(request: EvalRequest, *, as_json: bool = False) -> int:
    """Returns the exit status: 0 every episode has a result, 1 something failed, 2 it cannot be right, 130
    interrupted."""
    console = HeadConsole()
    try:
        plan = resolve_target(request)
        for edited in RunDir(request.target.resolve()).changed_code(plan.config):
            console.print(f"{edited} was edited since; it is used as it is", markup=False, soft_wrap=True)
        results = evaluate_plan(plan, console)
    except (ConfigError, DataError) as error:
        return console.complain(str(error), 2, as_json=as_json)
    except (RoleFailed, StalledRun, RedisLost, QueueError) as error:
        return console.complain(f"{error}\nthe same command continues it", 1, as_json=as_json)
    except (Interrupted, KeyboardInterrupt, asyncio.CancelledError):
        return console.complain("interrupted; the same command continues it", 130, as_json=as_json)
    report = write_report(plan, results)
    if as_json:
        print(json.dumps(report))
    else:
        terminal = Console(highlight=False)
        heading = f"{report['name']}: {report['model']}, temperature {report['temperature']:g}"
        terminal.print(heading, markup=False, soft_wrap=True)
        terminal.print(table_of(report))
    missing = len(plan.rows) * plan.samples - len(results)
    if missing:
        message = f"{missing} episodes failed for the infrastructure; the same command runs them again"
        console.print(message, style="red", markup=False, soft_wrap=True)
    return 1 if missing else 0


def evaluate_plan(plan: EvalPlan, console: Console) -> list[EpisodeResult]:
    """Run the episodes that the plan's folder lacks, and return the results of all that have one. Raises `ConfigError`,
    and what ends a run."""
    run = plan.run
    run.root.mkdir(parents=True, exist_ok=True)
    with FileLock(run.root / "lock", "another evaluation is running there", error=ConfigError):
        run.logs.mkdir(exist_ok=True)
        export_model(plan)
        _check_settings(plan)
        file = ResultsFile(run.root)
        total = len(plan.rows) * plan.samples
        earlier = f", {len(file.results)} of them are there from an earlier call" if file.results else ""
        console.print(f"{plan.config.name}: {total} episodes{earlier}", markup=False)
        console.print(f"  folder: {run.root}", markup=False, soft_wrap=True)
        if len(file.results) < total:
            refuse_doomed(evaluation_checks(plan.config))
            asyncio.run(_run(plan, file, console))
        return file.results


def _check_settings(plan: EvalPlan) -> None:
    """Results of other settings must not be mixed with these. Raises `ConfigError`."""
    file, settings = plan.run.root / EVALUATION_SETTINGS, plan.settings()
    if not file.exists():
        write_atomically(file, json.dumps(settings, indent=1) + "\n")
        return
    recorded, now = flat(json.loads(file.read_text(encoding="utf-8"))), flat(settings)
    different = [name for name in {*recorded, *now} if recorded.get(name) != now.get(name)]
    if different:
        raise ConfigError(
            f"{plan.run.root} holds an evaluation with other settings ({', '.join(sorted(different))}); give this one "
            "another --name, or remove the folder"
        )


async def _run(plan: EvalPlan, file: ResultsFile, console: Console) -> None:
    config, run, placement = plan.config, plan.run, LocalPlacement()
    # As the placement reads it: no GPU is the trainer's.
    without_trainer = config.model_copy(update={"trainer": config.trainer.model_copy(update={"ranks": 0})})
    async with open_run(config, run) as (link, queue, keepers), placement.open(without_trainer, run):

        def no_more(kind: str, number: int) -> Any:
            raise ConfigError(f"an evaluation has the {kind} roles that it began with")

        supervisor = Supervisor(lambda role: placement.place(role, run), no_more)
        collector = Collector(plan, file, queue, console)
        await _supervise(config, link, queue, supervisor, collector, keepers)


async def _supervise(  # noqa: PLR0917 - called in one place
    config: RunConfig,
    link: RunConnection,
    queue: TransferQueue,
    supervisor: Supervisor,
    collector: Collector,
    keepers: Sequence[asyncio.Task[None]],
) -> None:
    watchdog = Watchdog(config, supervisor.members, logger.error)
    helpers = [
        asyncio.create_task(_watch(queue, watchdog), name="watchdog"),
        asyncio.create_task(until_interrupted(asyncio.current_task(), trains=False), name="interrupt"),
        *keepers,
    ]
    for number in range(config.rollout.servers):
        supervisor.add(rollout_role(config, link, number))
    for number in range(config.agent.workers):
        supervisor.add(agent_role(config, link, number))
    supervising = asyncio.create_task(supervisor.run(helpers), name="supervisor")
    collecting = asyncio.create_task(collector.run(), name="collector")
    try:
        await asyncio.wait({supervising, collecting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        own = (supervising, collecting, *helpers[:2])
        ended = [task for task in (supervising, collecting) if task.done()]
        for task in own:
            task.cancel()
        try:
            await supervisor.stop()
        finally:  # also after a second Ctrl-C
            await asyncio.gather(*own, return_exceptions=True)
            collector.close()
    for task in ended:
        task.result()


async def _watch(queue: TransferQueue, watchdog: Watchdog) -> None:
    """Raises `StalledRun`."""
    while True:
        await asyncio.sleep(1.0)
        try:
            status, servers = await queue.status(), await queue.servers()
        except QueueUnavailable as error:
            logger.warning("queue: %s", error)
            continue
        await watchdog.look(0, status, servers)


class Collector:
    """Submits parts, and records those whose episodes have all ended."""

    def __init__(self, plan: EvalPlan, file: ResultsFile, queue: TransferQueue, console: Console) -> None:
        self._plan, self._file, self._queue = plan, file, queue
        self._tokenizer = load_tokenizer(plan.config.model)
        agent = plan.config.agent
        self._ahead = 2 * agent.workers * agent.concurrency
        """Episodes that are out at a time, to within a part: the workers never wait for tasks."""
        self._bar = EvalBar(len(plan.rows) * plan.samples, console)

    async def run(self) -> None:
        """Until every part is recorded. Raises `QueueError`."""
        done = self._file.done
        parts = parts_of(len(self._plan.rows), self._plan.samples)
        waiting = deque(part for part in parts if not done.issuperset(part.episodes))
        for part in parts:
            if part not in waiting:
                await self._queue.drop_split(part.split)  # recorded by a life that was killed before it did so
        out: dict[str, Part] = {}
        self._bar.show(len(self._file.results))
        while waiting or out:
            while waiting and sum(len(part.episodes) for part in out.values()) < self._ahead:
                part = waiting.popleft()
                await self._submit(part)
                out[part.split] = part
            await asyncio.sleep(POLL_S)
            with contextlib.suppress(QueueUnavailable):  # the watchdog says so if it lasts
                await self._look(out)

    def close(self) -> None:
        self._bar.close()

    async def _submit(self, part: Part) -> None:
        """Tasks that the queue has from an earlier life stay as they are."""
        done, plan = self._file.done, self._plan
        tasks = [
            task_of(part, row, sample, plan.rows[row], plan.temperature)
            for row, sample in part.episodes
            if (row, sample) not in done
        ]
        await self._queue.submit(tasks)

    async def _look(self, out: dict[str, Part]) -> None:
        counts = (await self._queue.status()).other_splits
        running = 0
        for split, part in list(out.items()):
            split_counts = counts.get(split, {})
            if split_counts.get("queued", 0) + split_counts.get("leased", 0):
                running += split_counts.get("done", 0)
                continue
            await self._record(part)
            del out[split]
        self._bar.show(len(self._file.results) + running)

    async def _record(self, part: Part) -> None:
        trajectories, _ = await self._queue.results(part.split)
        results = [one for one in (result_of(each, self._plan.rows) for each in trajectories) if one is not None]
        await asyncio.to_thread(self._file.add, part, results, trajectories, self._tokenizer)
        await self._queue.drop_split(part.split)


class EvalBar:
    """A progress bar on a terminal, a line every few seconds elsewhere."""

    def __init__(self, total: int, console: Console) -> None:
        self._total, self._console = total, console
        self._reported, self._line_at = -1, time.monotonic()
        columns = (TextColumn("episodes"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._bar.start()
        self._task = self._bar.add_task("episodes", total=total)

    def show(self, done: int) -> None:
        self._bar.update(self._task, completed=done)
        if self._bar.disable and done != self._reported and time.monotonic() - self._line_at > LINE_S:
            self._console.print(f"  {done} of {self._total} episodes", markup=False)
            self._reported, self._line_at = done, time.monotonic()

    def close(self) -> None:
        self._bar.stop()
