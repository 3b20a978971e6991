"""The roles of a run, each the main function of one process: join the queue, build the job, run it until SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from penstock.common import (
    DeviceClock,
    FileLock,
    NotPrivate,
    append_jsonl,
    die_with_parent,
    frozen_start,
    life_of_process,
    metrics_token,
    raise_open_files,
    uncollected,
    visible_devices,
)
from penstock.common.device_locks import until_up
from penstock.common.event_loop import run_users_code
from penstock.deploy.config import RunConfig
from penstock.deploy.recipe_tree import ConfigError
from penstock.deploy.run.connection import TOKEN_VARIABLE, RunConnection, archive_of, limits_of
from penstock.deploy.run.plan import LOADS_AFTER_VARIABLE, TORCHRUN_TELLS, TRAINER_STOP_S, trainer_stop_s
from penstock.deploy.run.processes import RESTARTS_VARIABLE, STOP_FILE_VARIABLE
from penstock.deploy.run.stacks import answer_with_stacks
from penstock.deploy.run.weights_folder import local_weights_dir, weights_dir, weights_entered
from penstock.deploy.run_dir import END_SUFFIX, RunDir
from penstock.deploy.telemetry.metrics import MetricsTarget, metrics_served, with_spans
from penstock.sandbox import SandboxConfig
from penstock.transfer_queue import NoSuchRun, OverBudget, QueueUnavailable, RunContext, TransferQueue, TurnSettings

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from penstock.gateway import Gateway
    from penstock.rollout_server import Sidecar
    from penstock.trainer import TrainJob

logger = logging.getLogger("penstock.run")
HEARTBEAT_S = 5.0
TRAINER_LOCK_S = 90.0
"""An earlier trainer saves a checkpoint and ends (`TRAINER_STOP_S`, or as much longer as its grace is); a shared disk
releases the lock of a dead machine later still."""


def run_role(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a role's coroutine to its end; SIGTERM and SIGINT cancel it, and it cleans up before the process ends."""
    if os.environ.get("PENSTOCK_SUPERVISED"):
        die_with_parent()
    logging.basicConfig(
        level=os.environ.get("PENSTOCK_LOG", "INFO"),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    raise_open_files()
    import uvloop

    with _end_noted(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            run_users_code(runner, _until_stopped(main()))
        except FatalError as reason:
            if stop_file := os.environ.get(STOP_FILE_VARIABLE):
                Path(stop_file).write_text(f"{reason}\n")
            # An OSError may come from anywhere; what other causes say is all that there is to know.
            traced = reason if isinstance(reason.__cause__, OSError) else None
            logging.getLogger("penstock").error("%s\na restart of this role would not help", reason, exc_info=traced)
            raise SystemExit(1) from None
        except (NoSuchRun, QueueUnavailable) as reason:
            logging.getLogger("penstock").error("%s", reason)
            raise SystemExit(1) from None


@contextlib.contextmanager
def _end_noted() -> Iterator[None]:
    """Note in a file what this process has used if its head is gone at the end of the block: the next reports it."""
    head, clock = os.getppid(), DeviceClock(len(visible_devices()))
    try:
        yield
    finally:
        if os.getppid() != head and (stop_file := os.environ.get(STOP_FILE_VARIABLE)):
            with contextlib.suppress(OSError):  # a full disk
                line = {"life": life_of_process(), "device_s": clock.elapsed_s()}
                append_jsonl(Path(stop_file).with_suffix(END_SUFFIX), [line])


class FatalError(Exception):
    """The role failed for a cause that a restart does not fix: the run stops and reports it."""


@contextlib.contextmanager
def fatal(*kinds: type[Exception]) -> Iterator[None]:
    """Raises `FatalError` for these."""
    try:
        yield
    except kinds as error:
        raise FatalError(f"{type(error).__name__}: {error}") from error


async def _until_stopped(main: Coroutine[Any, Any, None]) -> None:
    task = asyncio.ensure_future(main)
    beating = asyncio.create_task(beat(), name="heartbeat")
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    # Once: a scheduler signals every process of a job, and a supervisor or torchrun its children again. A second
    # cancellation would abort the trainer's last checkpoint.
    loop.add_signal_handler(signal.SIGTERM, lambda: None if task.cancelling() else task.cancel())
    answer_with_stacks(loop)
    try:
        await task
    except asyncio.CancelledError:
        logging.getLogger("penstock").info("stopped on request")
    finally:
        beating.cancel()


def context_of(link: RunConnection, queue: TransferQueue, config: RunConfig) -> RunContext:
    """Return the context of a role of the run. Files named in the recipe are searched in the working directory."""
    return RunContext(
        queue=queue,
        model=config.model,
        token=link.token,
        name=config.name,
        seed=config.seed,
        recipe_dir=Path.cwd(),
        lease_ttl_s=config.transfer_queue.lease_ttl_s,
        routing_replay=config.rollout.routing_replay,
        max_model_len=config.rollout.max_model_len,
        teacher_top_k=config.agent.teacher_top_k,
    )


def turn_of(config: RunConfig) -> TurnSettings | None:
    """Return the settings of devices that the trainer shares with engines; None: it has its own."""
    placement = config.placement
    if not placement.in_turns:
        return None
    # Longest wait of the trainer for the engines to hand shared devices over; then it ends.
    return TurnSettings(placement.memory_budget_bytes, config.transfer_queue.lease_ttl_s, 900.0, config.sleep_level)


def turn_of_server(config: RunConfig, *, lent: bool) -> TurnSettings | None:
    """Return the settings of devices that a rollout server shares with the trainer; None: it has its own. Raises
    `FatalError`.
    """
    if lent and not config.placement.lend:
        raise FatalError("--lent: this run's trainer keeps its devices; set placement.lend=true in its recipe")
    return turn_of(config) if lent or config.placement.colocated else None


def seed_of_server(seed: int, name: str) -> int:
    """Return the seed of a server's sampling: servers with one seed would answer one prompt alike. The same after a
    restart.
    """
    return xxhash.xxh32_intdigest(f"{seed}/{name}".encode()) >> 1  # 31 bits: engines take a signed number


async def rollout(
    link: RunConnection,
    name: str,
    host: str | None,
    port: int | None,
    *,
    evaluates: bool = False,
    lent: bool = False,
    wait_s: float = 0.0,
) -> None:
    """`lent`: on the trainer's devices, in turns with it."""
    with uncollected():
        from penstock.rollout_server import EngineError, ServerJob, serve

    def mount_gateway(sidecar: Sidecar, url: str) -> Gateway:
        with uncollected():  # only now, after the engine's process was started: that takes longest
            from penstock.gateway import GatewayJob, mount

        return mount(GatewayJob(run, config.agent, request_timeout_s=config.rollout.request_timeout_s))(sidecar, url)

    queue, config = await link.join(wait_s=wait_s)
    sys.path.insert(0, os.getcwd())  # users' reward functions by dotted path
    run = context_of(link, queue, config)
    job = ServerJob(
        name=name,
        run=replace(run, seed=seed_of_server(run.seed, name)),
        config=config.rollout,
        log_dir=RunDir.of(config).logs,
        host=host or config.rollout.host,
        port=config.rollout.port if port is None else port,
        fetch_dir=local_weights_dir(config, link.token) / f"fetched-by-{name}",
        evaluates=evaluates,
        metrics_token=metrics_token(link.token),
        mount=mount_gateway,
        turn=turn_of_server(config, lent=lent),
    )
    # The sidecar has restarted its engine as often as it may; `NotPrivate` is an `OSError`.
    with fatal(EngineError, OverBudget, OSError), weights_entered(config, link.token), frozen_start():
        await _closing(queue, with_spans("rollout", run.name, name, serve(job)))


async def agent(link: RunConnection, name: str, *, wait_s: float = 0.0) -> None:
    with uncollected():
        from penstock.agent_loops import AgentError, WorkerJob, run_worker
        from penstock.rollout_server import RolloutClient
        from penstock.sandbox import SandboxError
        from penstock.tools import ToolConfigError

    queue, config = await link.join(wait_s=wait_s)
    sys.path.insert(0, os.getcwd())  # users' loops and tools by dotted path
    client = RolloutClient(queue, link.token, config.rollout.request_timeout_s)
    run = context_of(link, queue, config)
    job = WorkerJob(
        name=name,
        run=run,
        config=config.agent,
        client=client,
        tools=config.tools,
        sandbox=config.sandbox,
        server_slots=config.rollout.max_concurrent,
        restarts=int(os.environ.get(RESTARTS_VARIABLE) or 0),
    )
    spans = with_spans("agent", run.name, name, run_worker(job))
    work = watched(config, link, MetricsTarget("", run.name, "agent", name), job.metrics.registry, spans)
    try:
        with fatal(AgentError, SandboxError, ToolConfigError):
            await _closing(client, _closing(queue, work))
    finally:
        gc.freeze()  # the process ends: a last collection, over all that its imports made, takes a third of a second


def leave_torchrun() -> None:
    """This process is the trainer's only rank."""
    for name in TORCHRUN_TELLS:
        os.environ.pop(name, None)


def train_job(run: RunContext, config: RunConfig, folder: Path) -> TrainJob:
    """Return a job that publishes and archives nothing, in `folder`."""
    from penstock.trainer import TrainJob

    return TrainJob(
        run=run,
        config=config.trainer,
        limits=limits_of(config),
        run_dir=folder,
        data=config.data,
        rollout=config.rollout,
        weights_dir=folder,
        temperature=config.agent.temperature,
        lost_payloads="strict",
        stop_timeout_s=trainer_stop_s(config.trainer),
        settings=config.model_dump(mode="json"),
    )


async def train_rank(link: RunConnection) -> None:
    """One rank of the trainer: the only one, or one of those that torchrun starts."""
    with uncollected():
        from penstock.common import UnknownName
        from penstock.trainer import (
            BadJob,
            BatchTimeout,
            DataError,
            NotResumable,
            NotSaved,
            PayloadsLost,
            TrainerMetrics,
            TrainingDiverged,
            train,
        )
        from penstock.transfer_queue import TooManyFiltered, TrainerFenced

    queue, config = await link.join(with_archive=True)
    run, run_dir, metrics = context_of(link, queue, config), RunDir.of(config), TrainerMetrics()
    job = replace(
        train_job(run, config, run_dir.root),
        weights_dir=weights_dir(config, link.token),
        lost_payloads=config.transfer_queue.lost_payloads,
        archive=archive_of(config),
        turn=turn_of(config),
        watchers=(metrics,),
    )
    work = train(job)
    if os.environ.get("RANK", "0") == "0":
        work = watched(config, link, MetricsTarget("", run.name, "trainer", "trainer"), metrics.registry, work)
    final = (BadJob, DataError, UnknownName, BatchTimeout, TrainingDiverged, TooManyFiltered, NotSaved, NotResumable)
    with fatal(*final, PayloadsLost, TrainerFenced, OverBudget, NotPrivate):
        lock_s = TRAINER_LOCK_S + max(0.0, trainer_stop_s(config.trainer) - TRAINER_STOP_S)
        async with sole_trainer(run_dir, lock_s):
            await until_up(engines_before(run_dir))
            with weights_entered(config, link.token):
                await _closing(queue, work)


def engines_before(run: RunDir) -> list[Path]:
    """Up-files of the engines after which the trainer loads. None at a restart: engines that are left have their memory
    by then, and one that failed for good never comes."""
    from penstock.rollout_server import engine_logs, up_file

    restarted = int(os.environ.get(RESTARTS_VARIABLE) or 0) > 0
    names = "" if restarted else os.environ.get(LOADS_AFTER_VARIABLE, "")
    return [up_file(engine_logs(run.logs, name)) for name in names.split(",") if name]


async def sandbox(config: SandboxConfig, host: str, port: int) -> None:
    """A sandbox server belongs to no run and needs only the token. Raises `ConfigError` if it cannot start."""
    from penstock.sandbox import SandboxError
    from penstock.sandbox.server import serve

    token = os.environ.get(TOKEN_VARIABLE)
    if not token:
        raise ConfigError(f"{TOKEN_VARIABLE} is not set; callers of the sandbox server must present it")
    try:
        await serve(config, host, port, token, metrics_token(token))
    except SandboxError as error:
        raise ConfigError(str(error)) from error


async def watched(
    config: RunConfig,
    link: RunConnection,
    who: MetricsTarget,
    registry: CollectorRegistry,
    work: Coroutine[Any, Any, None],
) -> None:
    """Runs `work` and serves its metrics meanwhile."""
    folder = RunDir.of(config).metric_addresses
    async with metrics_served(config.telemetry, registry, link.token, folder, who):
        await work


async def _closing(resource: Any, work: Awaitable[None]) -> None:
    try:
        await work
    finally:
        await resource.close()


async def beat() -> None:
    """Touches the file that the environment names, for a container's health check, while the event loop runs."""
    path = os.environ.get("PENSTOCK_HEARTBEAT")
    while path:
        Path(path).touch()  # noqa: ASYNC240 - a file in memory, and one call
        await asyncio.sleep(HEARTBEAT_S)


class TrainerAlive(Exception):
    """An earlier trainer of this run still holds its folder."""


@contextlib.asynccontextmanager
async def sole_trainer(run: RunDir, wait_s: float = TRAINER_LOCK_S) -> AsyncIterator[None]:
    """Entered by rank 0 when no other trainer is alive; other ranks wait for rank 0 when they form their group.

    Two trainers would write the same checkpoints and publish the same versions. The kernel, or the shared disk's
    server, releases the lock when its process dies. Raises `TrainerAlive` after `wait_s`.
    """
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    run.root.mkdir(parents=True, exist_ok=True)
    cause = "another trainer of this run is still alive; stop it, or wait until it has ended"
    lock = FileLock(run.root / "trainer.lock", cause, error=TrainerAlive)
    await lock.acquire_within(wait_s, lambda: logger.info("waiting for an earlier trainer of this run to end"))
    try:
        yield
    finally:
        lock.release()
