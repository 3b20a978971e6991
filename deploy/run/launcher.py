"""`penstock run`: every role a supervised process, here or where a placement puts it, from a recipe to a summary.

    check ─► lock the run's folder ─► redis ─► queue ─► data ─► rollout servers, agent workers, trainer (`supervisor`)
                                                                    │ restarted with back-off when they die
    summary ◄─ stop everything we started ◄─ trainer finished, a role failed for good, stalled, or Ctrl-C

Tasks: one per role (waits for its process), one for redis (restarts it), one reporter (reads metrics and the queue
every second), and those of the placement. The first that ends, ends the run; the others are cancelled and the
processes stopped in order: trainer (saves a checkpoint), agent workers (hand leases back), rollout servers, redis.

One process heads a run, and a run has one identity (`identity`). The lock on the run's folder (`run_dir.RunLock`) keeps
a second head away on one file system. The lease in the queue (`head_lease`) does so for heads that share only the
queue, and where a lock on a network file system has lapsed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from penstock.common import NotPrivate, keep_logs_bounded, rewrite_jsonl, write_atomically
from penstock.datasets import BadSpec, materialise_all
from penstock.deploy.config import RunConfig, dump_config
from penstock.deploy.recipe_tree import ConfigError
from penstock.deploy.run.connection import (
    INTERACTIVE,
    TOKEN_VARIABLE,
    RedisLost,
    RunConnection,
    connect_file,
    limits_of,
    own_redis,
    redis_login,
)
from penstock.deploy.run.console import drop_without_terminal
from penstock.deploy.run.head_lease import run_headed
from penstock.deploy.run.identity import (
    changed_settings,
    dataset_digests,
    describe_found,
    identity_of,
    refuse_another_model,
)
from penstock.deploy.run.plan import ADDED, page_roles, roles_of
from penstock.deploy.run.processes import RoleFailed, RoleProcess
from penstock.deploy.run.report import BudgetSpent, Reporter, restarts_of
from penstock.deploy.run.summary import load_plotting, write_summary
from penstock.deploy.run.supervisor import LocalPlacement, Placement, StalledRun, Supervisor, VersionRefused
from penstock.deploy.run.weights_folder import remove_weights, weights_entered
from penstock.deploy.run_dir import LivesFile, RunDir, RunLock
from penstock.deploy.telemetry.metrics import RoleState, head_served
from penstock.transfer_queue import QueueUnavailable, RedisTransferQueue, check_step_bytes

logger = logging.getLogger("penstock.run")


async def launch(config: RunConfig, *, resume: bool = False, placement: Placement | None = None) -> Path:
    """Run to the end and return the path of summary.json. No placement: this machine.

    Raises `ConfigError`, `QueueError`, `RoleFailed`, `StalledRun`, `VersionRefused`, and `Interrupted` after a first
    Ctrl-C, or one of `ending_signals`; however it ends, its processes are stopped and what was trained is summed up.
    """
    task = asyncio.current_task()
    assert task is not None
    # Until there are roles to stop in order: connect.env and a redis-server must not stay behind. Once: a second
    # cancellation would cut off their removal.
    for number in ending_signals():
        asyncio.get_running_loop().add_signal_handler(number, lambda: task.cancelling() or task.cancel())
    try:
        return await _launch(config, resume, placement or LocalPlacement())
    except asyncio.CancelledError:
        raise Interrupted from None


async def _launch(config: RunConfig, resume: bool, placement: Placement) -> Path:
    run = RunDir.of(config)
    with RunLock(run, resume=resume):
        if resume:
            refuse_another_model(run, config)
        run.logs.mkdir(exist_ok=True)
        config = _with_files(config, run)
        datasets = dataset_digests(config)
        limits = limits_of(config)
        check_step_bytes(replace(limits, group_size=config.largest_group), config.agent.most_response_tokens)
        async with open_queue(config, run) as (link, queue, keepers), run_headed(queue) as keeping:
            identity = identity_of(config, run)
            record = await queue.create_run(limits, dump_config(config), identity)
            changes = changed_settings(run, config, datasets) if resume else []
            summary = describe_found(record, await queue.status(), identity, changes) if resume else ""
            # Files that a head which was refused must not take from the one that lives.
            run.write_config(config)
            write_atomically(run.datasets, json.dumps(datasets, indent=1) + "\n")
            with connect_file(link, run):
                async with open_weights(config, link.token), placement.open(config, run):
                    await _run_roles(config, run, link, queue, placement, keepers=[*keepers, keeping], summary=summary)
    return run.summary


def _with_files(config: RunConfig, run: RunDir) -> RunConfig:
    """The configuration as all roles get it: absolute runs_dir, generated datasets as files of the run, its date.

    Raises `ConfigError` where a dataset cannot be made.
    """
    sources = {split: source for split, source in (("train", config.data.train), ("eval", config.data.eval)) if source}
    try:
        paths = materialise_all(list(sources.values()), run.data)
    except BadSpec as error:
        raise ConfigError(f"data: {error}") from error
    data = config.data.model_copy(update=dict(zip(sources, paths, strict=True)))
    before = yaml.safe_load(run.config.read_text()) if run.config.exists() else {}
    first_day = (before.get("agent") or {}).get("date") or date.today()  # that of an earlier life
    day = config.agent.date or date.fromisoformat(str(first_day))
    agent = config.agent.model_copy(update={"date": day})
    return config.model_copy(update={"runs_dir": str(Path(config.runs_dir).resolve()), "data": data, "agent": agent})


@contextlib.asynccontextmanager
async def open_queue(
    config: RunConfig, run: RunDir
) -> AsyncIterator[tuple[RunConnection, RedisTransferQueue, list[asyncio.Task[None]]]]:
    """A connection to the run's Redis: the one the recipe names, or one of our own, with its keeper."""
    token, url = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(32), config.transfer_queue.url
    async with contextlib.AsyncExitStack() as stack:
        keepers = []
        if url:
            username, password = redis_login()
            link = RunConnection(url, config.name, password, token, username)
        else:
            link, keeper = await stack.enter_async_context(own_redis(config, run, token))
            keepers.append(keeper)
        say = "the queue (transfer_queue.url) does not answer yet: it is asked for %.0f s"
        note = asyncio.get_running_loop().call_later(
            INTERACTIVE.deadline_s, logger.warning, say, config.transfer_queue.deadline_s
        )
        try:
            queue = await link.connect(config.transfer_queue)
        finally:
            note.cancel()
        stack.push_async_callback(queue.close)
        yield link, queue, keepers


@contextlib.asynccontextmanager
async def open_weights(config: RunConfig, token: str) -> AsyncIterator[None]:
    """The folder of published weights in this machine's shared memory, until the end of the run.

    Raises `ConfigError` if its name has something that is not this user's alone.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(weights_entered(config, token))
        except NotPrivate as error:
            raise ConfigError(str(error.strerror)) from error
        stack.callback(remove_weights, config)
        yield


@contextlib.asynccontextmanager
async def open_run(
    config: RunConfig, run: RunDir
) -> AsyncIterator[tuple[RunConnection, RedisTransferQueue, list[asyncio.Task[None]]]]:
    """The run of this name, which is new or continues, with its queue, connect.env and folder of weights.

    The tasks end if this head has lost the run, or its redis-server.
    """
    async with open_queue(config, run) as (link, queue, keepers), run_headed(queue) as keeping:
        await queue.create_run(limits_of(config), dump_config(config), identity_of(config, run))
        run.write_config(config)
        with connect_file(link, run):
            async with open_weights(config, link.token):
                yield link, queue, [*keepers, keeping]


async def _run_roles(
    config: RunConfig,
    run: RunDir,
    link: RunConnection,
    queue: RedisTransferQueue,
    placement: Placement,
    *,
    keepers: Sequence[asyncio.Task[None]],
    summary: str,
) -> None:
    """`keepers` end if this head has lost the run, or its redis-server. `summary`: what the run continues from."""
    lives = LivesFile(run.lives)
    supervisor = Supervisor(
        lambda role: placement.place(role, run), lambda kind, number: ADDED[kind](config, link, number)
    )
    forgive_workers = partial(supervisor.forgive, "agent")
    reporter = Reporter(config, run, queue, supervisor.members, lives, summary=summary, forgive_workers=forgive_workers)
    page = [RoleProcess(role.spec(run.logs)) for role in page_roles(config, run, link)]
    page_tasks = [asyncio.create_task(_run_page(p), name=p.spec.name) for p in page]
    watchers = [
        asyncio.create_task(reporter.run(), name="reporter"),
        asyncio.create_task(keep_logs_bounded(run.logs), name="logs"),
        asyncio.create_task(until_interrupted(asyncio.current_task()), name="interrupt"),
        *(asyncio.create_task(helper, name="placement") for helper in placement.helpers(supervisor)),
    ]

    def states() -> list[RoleState]:
        return [RoleState(member.spec.name, member.state, member.restarts) for member in (*supervisor.members, *page)]

    why = spent = ""
    try:
        for role in roles_of(config, link):
            supervisor.add(role)
        async with head_served(config, run, link.token, queue, states):
            await supervisor.run([*watchers, *keepers])
    except BudgetSpent as error:
        spent = str(error)
    except (RoleFailed, StalledRun, VersionRefused, RedisLost) as error:
        why = error.why
        raise
    finally:
        for watcher in watchers:
            watcher.cancel()
        plotting = asyncio.create_task(asyncio.to_thread(load_plotting), name="plotting")
        unsaved = await supervisor.stop()
        why = why or (unsaved.why if unsaved else "")
        await asyncio.gather(*(p.stop() for p in page))
        await asyncio.gather(plotting, return_exceptions=True)
        await asyncio.gather(*watchers, *page_tasks, return_exceptions=True)
        reporter.close()
        try:
            total = lives.total(restarts_of(supervisor.members))
            if why or spent:
                rewrite_jsonl(run.ended, [{"version": reporter.steps_done, "why": why or spent, "failed": bool(why)}])
            failed = [member.spec.name for member in supervisor.members if member.has_failed]
            await reporter.ends.send(queue)
            await write_summary(config, run, queue, total, failed)
        except (QueueUnavailable, OSError) as error:
            if not why:
                raise
            logger.error("no summary: %s", error)
        if unsaved is not None:
            raise unsaved


async def _run_page(process: RoleProcess) -> None:
    """Runs a process that the run does not need: its permanent failure is only logged."""
    try:
        await process.run()
    except RoleFailed as error:
        logger.warning("the run continues without its page: %s", error)


async def until_interrupted(main: asyncio.Task[Any] | None, *, trains: bool = True) -> None:
    """Raises `Interrupted` at the first Ctrl-C, or one of `ending_signals`: the run stops in order. `trains`: it saves
    a checkpoint.

    A second Ctrl-C cancels `main`, which stops the run in order: its processes are killed. Further ones of the others
    are ignored: a scheduler may signal the head more than once.
    """
    event = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_second() -> None:
        given_up = "the checkpoint under way is given up, " if trains else ""
        logger.warning("SIGINT again: %sthe processes are killed", given_up)
        if main is not None:
            main.cancel()

    def on_signal(number: signal.Signals) -> None:
        drop_without_terminal()
        loop.add_signal_handler(signal.SIGINT, on_second)
        for other in ending_signals():
            loop.add_signal_handler(other, event.set)
        saving = "saving a checkpoint and " if trains else ""
        logger.warning("%s: %sstopping every process of this run", number.name, saving)
        event.set()

    for number in (signal.SIGINT, *ending_signals()):
        loop.add_signal_handler(number, on_signal, number)
    await event.wait()
    raise Interrupted


def ending_signals() -> list[signal.Signals]:
    """SIGTERM, and the SIGHUP of a terminal that is closed, unless that is ignored, as below nohup."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM] if is_ignored else [signal.SIGTERM, signal.SIGHUP]


class Interrupted(Exception):
    """Ctrl-C, or one of `ending_signals`: the run was stopped in order and can be resumed."""
