"""`penstock run`: one machine, every role a supervised process, from a recipe to a summary.

    check ─► lock the run's folder ─► redis ─► ledger ─► data ─► rollout servers, agent workers, trainer
                                                                    │ restarted with back-off when they die
    summary ◄─ stop everything we started ◄─ trainer finished, a role failed for good, stalled, or Ctrl-C

Tasks: one per role (waits for its process), one for redis (restarts it), one reporter (reads metrics and the ledger
every second). The first that ends, ends the run; the others are cancelled and their processes stopped in order:
trainer (saves a checkpoint), agent workers (hand leases back), rollout servers, redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path

from penstock.deploy.config import RunConfig
from penstock.deploy.data.generate import materialise
from penstock.deploy.link import TOKEN_VARIABLE, Link, limits_of, redis_login
from penstock.deploy.load_config import dump_config
from penstock.deploy.own_redis import own_redis
from penstock.deploy.processes import RoleFailed, RoleProcess, RoleSpec
from penstock.deploy.report import Reporter, StalledRun
from penstock.deploy.roles import TRAINER_STOP_S, local_weights_dir, weights_dir
from penstock.deploy.run_dir import RunDir, RunLock
from penstock.deploy.summary import write_summary
from penstock.transfer_queue.capacity import check_step_bytes
from penstock.transfer_queue.redis_ledger import RedisLedger

logger = logging.getLogger("penstock.run")
PAGE_RESTARTS = 3


async def launch(config: RunConfig, *, resume: bool = False) -> Path:
    """Run to the end and return the path of summary.json.

    Raises `ConfigError`, `LedgerError`, `RoleFailed`, `StalledRun`, and `Interrupted` after a first Ctrl-C or SIGTERM;
    however it ends, its processes are stopped and what was trained is summed up.
    """
    run = RunDir.of(config)
    with RunLock(run, resume=resume):
        run.logs.mkdir(exist_ok=True)
        config = _with_data(config, run)
        run.config.write_text(dump_config(config))
        async with _ledger(config, run) as (link, ledger), _cleaned(run, config):
            limits = limits_of(config)
            check_step_bytes(limits, config.agent.max_response_tokens)
            await ledger.create_run(limits, dump_config(config))
            await _run_roles(config, run, link, ledger)
    return run.summary


def _with_data(config: RunConfig, run: RunDir) -> RunConfig:
    """Generated datasets are written to the run's folder; files stay where they are."""
    paths = {
        split: source and materialise(source, run.data)
        for split, source in (("train", config.data.train), ("eval", config.data.eval))
    }
    return config.model_copy(update={"data": config.data.model_copy(update=paths)})


@contextlib.asynccontextmanager
async def _ledger(config: RunConfig, run: RunDir) -> AsyncIterator[tuple[Link, RedisLedger]]:
    """A connection to the run's Redis: the one the recipe names, or one of our own that ends with the run."""
    token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(32)
    url = config.transfer_queue.url
    if url:
        username, password = redis_login()
        link = Link(url, config.name, password, token, username)
        async with _connected(link, config, run) as ledger:
            yield link, ledger
        return
    async with own_redis(config, run, token) as link, _connected(link, config, run) as ledger:
        yield link, ledger


@contextlib.asynccontextmanager
async def _connected(link: Link, config: RunConfig, run: RunDir) -> AsyncIterator[RedisLedger]:
    ledger = await link.connect(config.transfer_queue)
    with os.fdopen(os.open(run.connect_env, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(link.shell_lines())
    try:
        yield ledger
    finally:
        run.connect_env.unlink(missing_ok=True)
        await ledger.close()


@contextlib.asynccontextmanager
async def _cleaned(run: RunDir, config: RunConfig) -> AsyncIterator[None]:
    """Published weights in shared memory are gone when the run is, however it ended."""
    directories = {weights_dir(config), local_weights_dir(config)}
    try:
        yield
    finally:
        for directory in directories:
            shutil.rmtree(directory, ignore_errors=True)


async def _run_roles(config: RunConfig, run: RunDir, link: Link, ledger: RedisLedger) -> None:
    started = time.time()
    processes = [RoleProcess(spec) for spec in role_specs(config, run, link)]
    reporter = Reporter(config, run, ledger, processes)
    interrupt = _interrupt_event()
    tasks = [asyncio.create_task(p.run(), name=p.spec.name) for p in processes]
    page = [RoleProcess(spec) for spec in page_specs(config, run, link)]
    beside = [asyncio.create_task(_beside(p), name=p.spec.name) for p in page]
    watchers = [
        asyncio.create_task(reporter.run(), name="reporter"),
        asyncio.create_task(_raise_when_set(interrupt), name="interrupt"),
    ]
    trainer = tasks[-1]
    try:
        pending = {*tasks, *watchers}
        while not trainer.done():
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # a role that failed for good, a stalled run or Ctrl-C ends the run here
    finally:
        for watcher in watchers:
            watcher.cancel()
        await _stop_in_order([*processes, *page])
        await asyncio.gather(*tasks, *watchers, *beside, return_exceptions=True)
        reporter.close()
        await write_summary(config, run, ledger, wall_s=time.time() - started, processes=processes)


async def _stop_in_order(processes: Sequence[RoleProcess]) -> None:
    for kind in ("trainer", "agent", "rollout", "dashboard"):
        await asyncio.gather(*(p.stop() for p in processes if p.spec.name.startswith(kind)))


async def _beside(process: RoleProcess) -> None:
    """Run a process that the run goes on without: one that fails for good is told, no more."""
    try:
        await process.run()
    except RoleFailed as error:
        logger.warning("the run goes on without its page: %s", error)


def _interrupt_event() -> asyncio.Event:
    """Set by the first Ctrl-C or SIGTERM: the run stops in order. A second Ctrl-C is the shell's usual one.

    Further SIGTERMs change nothing: a scheduler that stops a job may tell the head more than once.
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
    """Ctrl-C or SIGTERM: the run stopped in order and can be resumed."""


def role_specs(config: RunConfig, run: RunDir, link: Link) -> list[RoleSpec]:
    """The processes of a run on one machine, the trainer last."""
    spec = partial(_spec, run, link)

    def port(server: int) -> str:
        return str(config.rollout.port and config.rollout.port + server)

    rollouts = [
        spec(name, "rollout", "--name", name, "--port", port(i), max_restarts=config.rollout.max_restarts)
        for i, name in ((i, f"rollout-{i}") for i in range(config.rollout.servers))
    ]
    if config.rollout.evaluation_server:
        last = ("--port", port(config.rollout.servers), "--evaluates")
        name = "rollout-eval"
        rollouts.append(spec(name, "rollout", "--name", name, *last, max_restarts=config.rollout.max_restarts))
    agents = [
        spec(f"agent-{i}", "agent", "--name", f"agent-{i}", max_restarts=config.agent.max_restarts)
        for i in range(config.agent.workers)
    ]
    trainer = spec("trainer", "train", max_restarts=config.trainer.max_restarts, stop_grace_s=TRAINER_STOP_S + 15)
    return [*rollouts, *agents, trainer]


def page_specs(config: RunConfig, run: RunDir, link: Link) -> list[RoleSpec]:
    """The page beside the run, where it is configured. An agent's rights are enough to queue dead letters again."""
    page = config.dashboard
    if not page.enabled:
        return []
    argv = ("dashboard", str(run.root.parent), "--host", page.host, "--port", str(page.port))
    return [_spec(run, link, "dashboard", *argv, rights="agent", max_restarts=PAGE_RESTARTS)]


def _spec(
    run: RunDir, link: Link, name: str, *argv: str, rights: str = "", max_restarts: int, stop_grace_s: float = 15.0
) -> RoleSpec:
    command = [sys.executable, "-m", "penstock.deploy.cli", *argv]
    settings = {"PENSTOCK_SUPERVISED": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    own = link.of_role(rights or name.partition("-")[0])
    env = {**os.environ, **own.environment(), "OMP_NUM_THREADS": "1", **settings}
    return RoleSpec(name, command, env, run.logs / f"{name}.log", max_restarts, stop_grace_s)


__all__ = ["Interrupted", "StalledRun", "launch", "role_specs"]
