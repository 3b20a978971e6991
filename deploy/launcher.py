"""`penstock run`: every role a supervised process, here or where a placement puts it, from a recipe to a summary.

    check ─► lock the run's folder ─► redis ─► queue ─► data ─► rollout servers, agent workers, trainer (`supervisor`)
                                                                    │ restarted with back-off when they die
    summary ◄─ stop everything we started ◄─ trainer finished, a role failed for good, stalled, or Ctrl-C

Tasks: one per role (waits for its process), one for redis (restarts it), one reporter (reads metrics and the queue
every second), and those of the placement. The first that ends, ends the run; the others are cancelled and the
processes stopped in order: trainer (saves a checkpoint), agent workers (hand leases back), rollout servers, redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from penstock.common import NotPrivate, rewrite_jsonl
from penstock.datasets import BadSpec, materialise_all
from penstock.deploy.config import ConfigError, RunConfig, dump_config
from penstock.deploy.connection import (
    TOKEN_VARIABLE,
    RedisLost,
    RunConnection,
    connect_file,
    limits_of,
    own_redis,
    redis_login,
)
from penstock.deploy.head import describe_found, identity_of, run_headed
from penstock.deploy.lives import LivesFile
from penstock.deploy.plan import ADDED, page_roles, roles_of
from penstock.deploy.preflight.stop_grace import with_stop_grace
from penstock.deploy.processes import RoleFailed, RoleProcess
from penstock.deploy.report import Reporter, StalledRun, VersionRefused, restarts_of
from penstock.deploy.run_dir import RunDir, RunLock
from penstock.deploy.summary import load_plotting, write_summary
from penstock.deploy.supervisor import LocalPlacement, Placement, Supervisor
from penstock.deploy.telemetry import head_served
from penstock.deploy.weights_folder import remove_weights, weights_entered
from penstock.transfer_queue import Limits, QueueUnavailable, RedisTransferQueue, TransferQueue, check_step_bytes

logger = logging.getLogger("penstock.run")


async def launch(config: RunConfig, *, resume: bool = False, placement: Placement | None = None) -> Path:
    """Run to the end and return the path of summary.json. No placement: this machine.

    Raises `ConfigError`, `QueueError`, `RoleFailed`, `StalledRun`, `VersionRefused`, and `Interrupted` after a first
    Ctrl-C or SIGTERM; however it ends, its processes are stopped and what was trained is summed up.
    """
    task = asyncio.current_task()
    assert task is not None
    # Until there are roles to stop in order: connect.env and a redis-server must not stay behind. Once: a second
    # cancellation would cut off their removal.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: task.cancelling() or task.cancel())
    try:
        return await _launch(config, resume, placement or LocalPlacement())
    except asyncio.CancelledError:
        raise Interrupted from None


async def _launch(config: RunConfig, resume: bool, placement: Placement) -> Path:
    run = RunDir.of(config)
    with RunLock(run, resume=resume):
        run.logs.mkdir(exist_ok=True)
        config = _for_all_roles(config, run)
        limits = limits_of(config)
        check_step_bytes(replace(limits, group_size=config.largest_group), config.agent.most_response_tokens)
        async with open_queue(config, run) as (link, queue, keepers), run_headed(queue) as keeping:
            found = await _enter(config, run, queue, limits)
            # Files that a head which was refused must not take from the one that lives.
            run.config.write_text(dump_config(config))
            with connect_file(link, run):
                async with open_weights(config, link.token), placement.open(config, run):
                    await _run_roles(
                        config, run, link, queue, placement, keepers=[*keepers, keeping], found=found if resume else ""
                    )
    return run.summary


async def _enter(config: RunConfig, run: RunDir, queue: TransferQueue, limits: Limits) -> str:
    """Creates the run, or enters its own in the queue; returns what was found there. Raises `RunTaken`."""
    identity = identity_of(config, run)
    found = await queue.create_run(limits, dump_config(config), identity)
    return describe_found(found, await queue.status(), identity)


def _for_all_roles(config: RunConfig, run: RunDir) -> RunConfig:
    """The configuration as all roles get it: absolute runs_dir, generated datasets as files of the run, and the
    trainer's grace in seconds.

    Raises `ConfigError` where a dataset cannot be made.
    """
    sources = {split: source for split, source in (("train", config.data.train), ("eval", config.data.eval)) if source}
    try:
        paths = materialise_all(list(sources.values()), run.data)
    except BadSpec as error:
        raise ConfigError(f"data: {error}") from error
    data = config.data.model_copy(update=dict(zip(sources, paths, strict=True)))
    config = with_stop_grace(config)
    return config.model_copy(update={"runs_dir": str(Path(config.runs_dir).resolve()), "data": data})


@contextlib.asynccontextmanager
async def open_queue(
    config: RunConfig, run: RunDir
) -> AsyncIterator[tuple[RunConnection, RedisTransferQueue, list[asyncio.Task[None]]]]:
    """A connection to the run's Redis: the one the recipe names, or one of our own, with its keeper."""
    token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(32)
    url = config.transfer_queue.url
    if url:
        username, password = redis_login()
        link = RunConnection(url, config.name, password, token, username)
        async with _connected(link, config) as queue:
            yield link, queue, []
        return
    async with own_redis(config, run, token) as (link, keeper), _connected(link, config) as queue:
        yield link, queue, [keeper]


@contextlib.asynccontextmanager
async def _connected(link: RunConnection, config: RunConfig) -> AsyncIterator[RedisTransferQueue]:
    queue = await link.connect(config.transfer_queue)
    try:
        yield queue
    finally:
        await queue.close()


@contextlib.asynccontextmanager
async def open_weights(config: RunConfig, token: str) -> AsyncIterator[None]:
    """The folder of published weights in this machine's shared memory, until the end of the run.

    Raises `ConfigError` where its name has something that is not this user's alone.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(weights_entered(config, token))
        except NotPrivate as error:
            raise ConfigError(str(error.strerror)) from error
        stack.callback(remove_weights, config)
        yield


async def _run_roles(
    config: RunConfig,
    run: RunDir,
    link: RunConnection,
    queue: RedisTransferQueue,
    placement: Placement,
    *,
    keepers: Sequence[asyncio.Task[None]],
    found: str,
) -> None:
    """`keepers` end where this head has lost the run, or its redis-server. `found`: what the run continues from."""
    lives = LivesFile(run.lives)
    supervisor = Supervisor(
        lambda role: placement.place(role, run), lambda kind, number: ADDED[kind](config, link, number)
    )
    forgive_workers = partial(supervisor.forgive, "agent")
    reporter = Reporter(config, run, queue, supervisor.members, lives, found=found, forgive_workers=forgive_workers)
    page = [RoleProcess(role.spec(run.logs)) for role in page_roles(config, run, link)]
    beside = [asyncio.create_task(_beside(p), name=p.spec.name) for p in page]
    watchers = [
        asyncio.create_task(reporter.run(), name="reporter"),
        asyncio.create_task(until_interrupted(), name="interrupt"),
        *(asyncio.create_task(helper, name="placement") for helper in placement.helpers(supervisor)),
    ]
    why = ""
    try:
        for role in roles_of(config, link):
            supervisor.add(role)
        async with head_served(config, run, link, queue, lambda: [*supervisor.members, *page]):
            await supervisor.run([*watchers, *keepers])
    except (RoleFailed, StalledRun, VersionRefused, RedisLost) as error:
        why = error.why
        raise
    finally:
        for watcher in watchers:
            watcher.cancel()
        plotting = asyncio.create_task(asyncio.to_thread(load_plotting), name="plotting")
        await supervisor.stop()
        await asyncio.gather(*(p.stop() for p in page))
        await asyncio.gather(plotting, return_exceptions=True)
        await asyncio.gather(*watchers, *beside, return_exceptions=True)
        reporter.close()
        total = lives.total(restarts_of(supervisor.members))
        if why:
            rewrite_jsonl(run.ended, [{"version": reporter.steps_done, "why": why}])
        try:
            await write_summary(config, run, queue, total)
        except QueueUnavailable as error:
            if not why:
                raise
            logger.error("no summary without the queue: %s", error)


async def _beside(process: RoleProcess) -> None:
    """Runs a process that the run does not need: its permanent failure is only logged."""
    try:
        await process.run()
    except RoleFailed as error:
        logger.warning("the run continues without its page: %s", error)


def _interrupt_event() -> asyncio.Event:
    """Set by the first Ctrl-C or SIGTERM: the run stops in order. A second Ctrl-C is the shell's usual one.

    Further SIGTERMs are ignored: a scheduler may signal the head more than once.
    """
    event = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        logger.warning("%s: saving a checkpoint and stopping every process of this run", number.name)
        event.set()
        loop.remove_signal_handler(signal.SIGINT)
        loop.add_signal_handler(signal.SIGTERM, event.set)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    return event


async def until_interrupted() -> None:
    """Raises `Interrupted` at the first Ctrl-C or SIGTERM."""
    await _interrupt_event().wait()
    raise Interrupted


class Interrupted(Exception):
    """Ctrl-C or SIGTERM: the run was stopped in order and can be resumed."""


__all__ = ["Interrupted", "StalledRun", "VersionRefused", "launch", "open_queue", "open_weights", "until_interrupted"]
