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
import time
from collections.abc import AsyncIterator
from pathlib import Path

from penstock.common import rewrite_jsonl
from penstock.datasets import materialise
from penstock.deploy.config import RunConfig, dump_config
from penstock.deploy.connection import TOKEN_VARIABLE, RunConnection, limits_of, own_redis, redis_login
from penstock.deploy.plan import ADDED, page_roles, roles_of
from penstock.deploy.processes import RoleFailed, RoleProcess
from penstock.deploy.report import Reporter, StalledRun
from penstock.deploy.run_dir import RunDir, RunLock, remove_weights
from penstock.deploy.summary import write_summary
from penstock.deploy.supervisor import LocalPlacement, Placement, Supervisor
from penstock.deploy.telemetry import head_served
from penstock.transfer_queue import RedisTransferQueue, check_step_bytes

logger = logging.getLogger("penstock.run")


async def launch(config: RunConfig, *, resume: bool = False, placement: Placement | None = None) -> Path:
    """Run to the end and return the path of summary.json. No placement: this machine.

    Raises `ConfigError`, `QueueError`, `RoleFailed`, `StalledRun`, and `Interrupted` after a first Ctrl-C or SIGTERM;
    however it ends, its processes are stopped and what was trained is summed up.
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
        run.config.write_text(dump_config(config))
        async with _queue(config, run) as (link, queue), _cleaned(config), placement.open(config, run):
            limits = limits_of(config)
            check_step_bytes(limits, config.agent.max_response_tokens)
            await queue.create_run(limits, dump_config(config))
            await _run_roles(config, run, link, queue, placement)
    return run.summary


def _for_all_roles(config: RunConfig, run: RunDir) -> RunConfig:
    """The configuration as all roles get it: absolute runs_dir, and generated datasets as files of the run."""
    paths = {
        split: source and materialise(source, run.data)
        for split, source in (("train", config.data.train), ("eval", config.data.eval))
    }
    data = config.data.model_copy(update=paths)
    return config.model_copy(update={"runs_dir": str(Path(config.runs_dir).resolve()), "data": data})


@contextlib.asynccontextmanager
async def _queue(config: RunConfig, run: RunDir) -> AsyncIterator[tuple[RunConnection, RedisTransferQueue]]:
    """A connection to the run's Redis: the one the recipe names, or one of our own that ends with the run."""
    token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(32)
    url = config.transfer_queue.url
    if url:
        username, password = redis_login()
        link = RunConnection(url, config.name, password, token, username)
        async with _connected(link, config, run) as queue:
            yield link, queue
        return
    async with own_redis(config, run, token) as link, _connected(link, config, run) as queue:
        yield link, queue


@contextlib.asynccontextmanager
async def _connected(link: RunConnection, config: RunConfig, run: RunDir) -> AsyncIterator[RedisTransferQueue]:
    queue = await link.connect(config.transfer_queue)
    with os.fdopen(os.open(run.connect_env, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(link.shell_lines())
    try:
        yield queue
    finally:
        run.connect_env.unlink(missing_ok=True)
        await queue.close()


@contextlib.asynccontextmanager
async def _cleaned(config: RunConfig) -> AsyncIterator[None]:
    """Removes published weights from this machine's shared memory at the end of the run."""
    try:
        yield
    finally:
        remove_weights(config)


async def _run_roles(
    config: RunConfig, run: RunDir, link: RunConnection, queue: RedisTransferQueue, placement: Placement
) -> None:
    started = time.time()
    supervisor = Supervisor(
        lambda role: placement.place(role, run), lambda kind, number: ADDED[kind](config, link, number)
    )
    reporter = Reporter(config, run, queue, supervisor.members)
    page = [RoleProcess(role.spec(run.logs)) for role in page_roles(config, run, link)]
    beside = [asyncio.create_task(_beside(p), name=p.spec.name) for p in page]
    watchers = [
        asyncio.create_task(reporter.run(), name="reporter"),
        asyncio.create_task(_raise_when_set(_interrupt_event()), name="interrupt"),
        *(asyncio.create_task(helper, name="placement") for helper in placement.helpers(supervisor)),
    ]
    why = ""
    try:
        for role in roles_of(config, link):
            supervisor.add(role)
        async with head_served(config, run, link, queue, lambda: [*supervisor.members, *page]):
            await supervisor.run(watchers)
    except (RoleFailed, StalledRun) as error:
        why = error.why
        raise
    finally:
        for watcher in watchers:
            watcher.cancel()
        await supervisor.stop()
        await asyncio.gather(*(p.stop() for p in page))
        await asyncio.gather(*watchers, *beside, return_exceptions=True)
        reporter.close()
        if why:
            rewrite_jsonl(run.ended, [{"version": reporter.steps_done, "why": why}])
        await write_summary(config, run, queue, wall_s=time.time() - started, members=supervisor.members)


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


async def _raise_when_set(event: asyncio.Event) -> None:
    await event.wait()
    raise Interrupted


class Interrupted(Exception):
    """Ctrl-C or SIGTERM: the run was stopped in order and can be resumed."""


__all__ = ["Interrupted", "StalledRun", "launch"]
