"""`penstock serve`: a base model, its trainer, rollout servers, queue and the Tinker API, until Ctrl-C.

    lock the folder ─► redis ─► queue ─► rollout servers, API, trainer (`supervisor`)

All that clients have is in the run's folder and its Redis: started again in the same folder, the service continues
where it was stopped or killed.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.common import FileLock, frozen_start, keep_logs_bounded, listen, write_atomically
from penstock.deploy.config import RunConfig, load_config
from penstock.deploy.preflight.service import KEYS_VARIABLE
from penstock.deploy.preflight.suite import refuse_doomed, service_checks
from penstock.deploy.recipe_tree import ConfigError
from penstock.deploy.run.connection import RedisLost, RunConnection
from penstock.deploy.run.console import HeadConsole
from penstock.deploy.run.launcher import Interrupted, open_run, until_interrupted
from penstock.deploy.run.plan import rollout_role, service_roles
from penstock.deploy.run.processes import RoleFailed
from penstock.deploy.run.roles import context_of, fatal, sole_trainer, watched
from penstock.deploy.run.supervisor import LocalPlacement, Supervisor
from penstock.deploy.run_dir import RunDir
from penstock.deploy.telemetry.metrics import MetricsTarget, RequestCounts, RoleState, head_served
from penstock.service import ServiceContext, ServiceJob, parse_keys, run_service, serve_api
from penstock.trainer import BadJob, NotSaved
from penstock.transfer_queue import LogForgotten, QueueError


def serve_recipe(recipe: Path, overrides: list[str], *, host: str, port: int, model_name: str | None) -> int:
    """Returns the exit status: 1 something failed, 2 it cannot be right, 130 stopped."""
    console = HeadConsole()
    try:
        config = _with_adapters(load_config(recipe, overrides, with_tasks=False))
        refuse_doomed(service_checks(config, with_trials=False))
        asyncio.run(_serve(config, console, host=host, port=port, model_name=model_name or Path(config.model).name))
    except (ConfigError, BadJob, OSError) as error:
        return console.complain(str(error), 2)
    except (RoleFailed, RedisLost, QueueError) as error:
        return console.complain(f"{error}\nthe same command continues the service", 1)
    except (Interrupted, KeyboardInterrupt, asyncio.CancelledError):
        return console.complain("stopped; the same command continues the service", 130)
    return 0


def _with_adapters(config: RunConfig) -> RunConfig:
    """Servers have places for the adapters that clients train."""
    rollout = config.rollout.model_copy(update={"adapter_rank": config.trainer.lora.rank})
    return config.model_copy(update={"rollout": rollout})


async def _serve(config: RunConfig, console: Console, *, host: str, port: int, model_name: str) -> None:
    run, placement = RunDir.of(config), LocalPlacement()
    run.root.mkdir(parents=True, exist_ok=True)
    with FileLock(run.root / "lock", "another service is running there", error=ConfigError), listen(host, port) as free:
        run.logs.mkdir(exist_ok=True)
        port = free.getsockname()[1]
        key_file = None if KEYS_VARIABLE in os.environ else run.root / "service" / "key"
        if key_file and not key_file.exists():
            key_file.parent.mkdir(exist_ok=True)
            write_atomically(key_file, f"tml-{secrets.token_urlsafe(32)}\n", mode=0o600)
        free.close()
        async with open_run(config, run) as (link, queue, keepers), placement.open(config, run):
            words = ("--host", host, "--port", str(port), "--model-name", model_name)
            supervisor = Supervisor(
                lambda role: placement.place(role, run), lambda _, number: rollout_role(config, link, number)
            )
            for role in service_roles(config, link, words, model_name):
                supervisor.add(role)
            _say(console, run, f"http://{host}:{port}", model_name, key_file)
            counts = RequestCounts()
            say = partial(console.print, markup=False, soft_wrap=True)
            work = [counts.follow(queue.requests, say), keep_logs_bounded(run.logs)]

            def states() -> list[RoleState]:
                return [RoleState(one.spec.name, one.state, one.restarts) for one in supervisor.members]

            async with head_served(config, run, link.token, queue, states, further=[counts]):
                await _until_over(supervisor, work, keepers)


def _say(console: Console, run: RunDir, url: str, model_name: str, key_file: Path | None) -> None:
    key = f"$(cat {key_file})" if key_file else f"a key of {KEYS_VARIABLE}"
    for line in (f"{run.root.name}: serves {model_name}", f"  folder: {run.root}", "  for Tinker's SDK and recipes:"):
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"    export TINKER_BASE_URL={url} TINKER_API_KEY={key}", markup=False, soft_wrap=True)


async def _until_over(
    supervisor: Supervisor, work: Sequence[Coroutine[Any, Any, None]], keepers: list[asyncio.Task[None]]
) -> None:
    """`work` runs meanwhile."""
    helpers = [asyncio.create_task(one) for one in (until_interrupted(asyncio.current_task()), *work)]
    try:
        await supervisor.run([*helpers, *keepers])
    finally:
        for helper in helpers:
            helper.cancel()
        await supervisor.stop()
        await asyncio.gather(*helpers, return_exceptions=True)


# roles -------------------------------------------------------------------------------------------------------------
async def service_trainer(link: RunConnection, model_name: str) -> None:
    """The trainer of a service."""
    queue, config = await link.join()
    run_dir = RunDir.of(config)
    job = ServiceJob(
        run=context_of(link, queue, config),
        config=config.trainer,
        rollout=config.rollout,
        folder=run_dir.root / "service",
        model_name=model_name,
        quotas=config.serve.quotas,
        log_bytes=config.transfer_queue.max_bytes // 2,
    )
    try:
        with fatal(BadJob, LogForgotten, NotSaved):
            async with sole_trainer(run_dir):
                who = MetricsTarget("", config.name, "service", "trainer")
                await watched(config, link, who, job.metrics.registry, run_service(job))
    finally:
        await queue.close()


async def service_api(link: RunConnection, host: str, port: int, model_name: str) -> None:
    """The API process of a service."""
    queue, config = await link.join()
    folder = RunDir.of(config).root / "service"
    keys = os.environ.get(KEYS_VARIABLE) or f"owner={(folder / 'key').read_text().strip()}"
    owners = parse_keys(keys)
    context = ServiceContext(
        queue.requests,
        folder,
        model_name,
        config.rollout.max_model_len,
        link.token,
        owner_bytes=config.transfer_queue.max_bytes // 2 // len(set(owners.values())),
    )
    try:
        with frozen_start():
            who = MetricsTarget("", config.name, "api", "api")
            work = serve_api(context, owners, host, port)
            await watched(config, link, who, context.metrics.registry, work)
    finally:
        await queue.close()
