"""The process of one rollout server: the engine's process first, which takes longest, and HTTP while that starts.

Until the engine is ready HTTP says why it is not. Stop order: registry entry, requests in flight, engine,
HTTP. No new request is routed here before anything ends.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from penstock.common import (
    HttpServer,
    cancel_and_wait,
    keep_logs_bounded,
    listen,
    process_identity,
    uncollected,
    url_of,
)
from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.engines.checkpoint import find_model
from penstock.rollout_server.engines.child import engine_logs
from penstock.rollout_server.engines.registry import MakeEngine, make_engine
from penstock.rollout_server.protocol import EngineError
from penstock.rollout_server.server.engine_devices import EngineDevices
from penstock.rollout_server.server.sidecar import Sidecar
from penstock.transfer_queue import DeviceTurn, RunContext, TurnSettings
from penstock.weight_sync import BroadcastMember, ClosableFetch, Fetcher, MergingFetcher, StagedFetch, WeightsRefused

if TYPE_CHECKING:
    from penstock.rollout_server.server.routes import MountedRoutes

logger = logging.getLogger(__name__)
HTTP_STOP_S = 5.0


@dataclass(frozen=True)
class ServerJob:
    """Settings of one rollout server."""

    name: str
    """Id in the registry; a restarted server has the same one."""
    run: RunContext
    """Every route requires its token."""
    config: RolloutConfig
    log_dir: Path
    """The engine's log is in `NAME-engine` there, kept over restarts and bounded."""
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one."""
    fetch_dir: Path | None = None
    """Folder of this server alone, for weights fetched over HTTP and merged adapters; None: in `log_dir`."""
    evaluates: bool = False
    """True if it serves evaluations only, and keeps its weights during one."""
    drain_s: float = 20.0
    """Longest time that requests in flight may take when the server stops."""
    metrics_token: str = field(default="", repr=False)
    """Opens ``/metrics`` and nothing else; empty: only the run's token does."""
    mount: Callable[[Sidecar, str], MountedRoutes] | None = None
    """Makes further routes from the sidecar and its URL, before the first request."""
    turn: TurnSettings | None = None
    """Turns on devices that are shared with the trainer; None: they are this server's own."""


async def serve(job: ServerJob, new_engine: MakeEngine = make_engine) -> None:
    """Serves until cancelled or drained.

    Raises:
        EngineError: the engine could not be kept alive.
        OverBudget: it needs more of the shared devices than there is.
        OSError: the port is taken, or the address is not this machine's.
    """
    run = job.run
    try:
        listener = listen(job.host, job.port)
    except OSError as error:
        setting = "rollout.port" if error.errno == errno.EADDRINUSE else "rollout.host"
        raise OSError(error.errno, f"{setting}: {error.strerror}") from error
    with listener:
        url = url_of(listener, job.host)
        member = _member(job)
        fetcher = _fetcher(job, member)
        sidecar = Sidecar(
            job.name, url, partial(new_engine, job.config, run.model, _log_dir(job), run.seed), run.queue,
            slots=job.config.max_concurrent, fetch=fetcher, member=member,
            truncated_sampling=job.config.truncated_sampling, stall_s=job.config.request_timeout_s,
            evaluates=job.evaluates, devices=_devices(job),
        )  # fmt: skip
        running = asyncio.create_task(sidecar.run(job.config.max_restarts))
        mounted: MountedRoutes | None = None
        drain = asyncio.Event()
        try:
            make_app = await asyncio.to_thread(_import_routes)
            mounted = job.mount(sidecar, url) if job.mount else None
            app = make_app(sidecar, run.model, run.token, drain.set, mounted, metrics_token=job.metrics_token)
            http = HttpServer(app, listener, lifespan="off", stop_s=HTTP_STOP_S, deadline_s=HTTP_STOP_S)
            await http.start()
            logger.info("rollout server %s at %s", job.name, url)
            await _run(job, sidecar, running, http, drain)
        finally:
            await cancel_and_wait([running])
            try:
                if mounted is not None:
                    await mounted.close()
            finally:
                await fetcher.close()


def _import_routes() -> Callable[..., ASGIApp]:
    """`make_app`. Called in a thread: importing FastAPI takes a tenth of a second, while the event loop starts the
    engine."""
    with uncollected():
        from penstock.rollout_server.server.routes import make_app

    return make_app


async def _run(
    job: ServerJob,
    sidecar: Sidecar,
    running: asyncio.Task[None],
    http: HttpServer,
    drain: asyncio.Event,
) -> None:
    """Runs until one of its parts ends or a drain is requested; raises the error that ended it.

    Args:
        running: the task of the sidecar.
    """
    serving = asyncio.create_task(http.wait())
    leaving = asyncio.create_task(drain.wait())
    bounding = asyncio.create_task(keep_logs_bounded(_log_dir(job)))
    try:
        await asyncio.wait({serving, running, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        bounding.cancel()
        await sidecar.drain(job.drain_s)
        running.cancel()
        await asyncio.wait({running})
        await http.stop()
        await cancel_and_wait([serving])
    for task in (running, serving):
        if not task.cancelled():
            task.result()


def _devices(job: ServerJob) -> EngineDevices | None:
    if job.turn is None:
        return None
    holder = f"{job.name} ({process_identity()}-{secrets.token_hex(4)})"
    return EngineDevices(DeviceTurn(job.run.queue, "engine", holder, job.turn), job.turn.sleep_level)


def _member(job: ServerJob) -> BroadcastMember | None:
    """None for a server that takes files: one that keeps its version for an evaluation cannot be received into."""
    config = job.config
    if not config.broadcasts_weights or (config.receives_in_place and job.evaluates):
        return None
    return BroadcastMember(job.run.token, in_place=config.receives_in_place)


def _fetcher(job: ServerJob, member: BroadcastMember | None) -> ClosableFetch:
    folder, config = job.fetch_dir or job.log_dir / f"weights-of-{job.name}", job.config
    files = MergingFetcher(
        Fetcher(folder, job.run.token, job.host),
        folder / "merged",
        partial(_model_folder, job.run.model),
        config.dtype,
        config.threads,
    )
    return files if member is None else StagedFetch(member, files)


def _model_folder(model: str) -> Path:
    """Raises `WeightsRefused` if it is not on this machine."""
    try:
        return find_model(model)
    except EngineError as error:
        raise WeightsRefused(str(error)) from error


def _log_dir(job: ServerJob) -> Path:
    return engine_logs(job.log_dir, job.name)
