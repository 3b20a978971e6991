"""One rollout server: the sidecar process. HTTP first, so that it can say why it is not ready; then the engine.

Engine logs outlive their engines and never fill the disk: engines append, what is too long is moved aside.

    engine-hf.log ──copied, then cut to nothing──► engine-hf.log.1 ──► .2 ──► gone

Cut in place, not renamed: a running engine has the file open, and appends at the end wherever the end is.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import uvicorn

from penstock.rollout_server.adapters import MergingFetch
from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.engines.registry import MakeEngine, make_engine
from penstock.rollout_server.fetch import Fetcher
from penstock.rollout_server.registration import ServerQueue
from penstock.rollout_server.routes import Mounted, make_app
from penstock.rollout_server.sidecar import Sidecar

logger = logging.getLogger(__name__)
DRAIN_S = 20.0
HTTP_STOP_S = 5.0
KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections (15 s): none sends a request into one that is being closed."""
LOGS_S = 30.0


@dataclass(frozen=True)
class ServerJob:
    """Everything one rollout server needs."""

    name: str
    """Its id in the registry; a restarted server comes back under the same one."""
    config: RolloutConfig
    queue: ServerQueue
    model: str
    """Model folder or hub name: the weights of version 0."""
    token: str
    """The run's token, asked for on every route."""
    log_dir: Path
    """The engine's log goes into `NAME-engine` there; it is kept over restarts, and bounded."""
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one."""
    seed: int = 0
    fetch_dir: Path | None = None
    """Where weights that come over HTTP, and merged adapters, lie, this server's own; None: in `log_dir`."""
    evaluates: bool = False
    """It takes the episodes of evaluations alone, and keeps its weights while one is on."""
    drain_s: float = DRAIN_S
    """How long requests in flight may take once the server has to go."""
    metrics_token: str = field(default="", repr=False)
    """Opens ``/metrics`` and nothing else; empty: the run's token alone does."""
    mount: Callable[[Sidecar, str], Mounted] | None = None
    """Further routes, made from the sidecar and its own URL before the first request comes."""


async def serve(job: ServerJob, new_engine: MakeEngine = make_engine) -> None:
    """Serve until cancelled or drained; then in-flight requests end, and the engine.

    Raises `EngineError` where the engine could not be kept alive, `OSError` where the port is taken.
    """
    logs = job.log_dir / f"{job.name}-engine"
    with _listen(job.host, job.port) as listener:
        url = f"http://{url_host(job.host)}:{listener.getsockname()[1]}"
        fetcher = _fetcher(job)
        sidecar = Sidecar(
            job.name, url, partial(new_engine, job.config, job.model, logs, job.seed), job.queue,
            slots=job.config.max_concurrent, fetch=fetcher,
            truncated_sampling=job.config.truncated_sampling, stall_s=job.config.request_timeout_s,
            evaluates=job.evaluates,
        )  # fmt: skip
        asked_to_go = asyncio.Event()
        mounted = job.mount(sidecar, url) if job.mount else None
        http = HttpServer(uvicorn.Config(
            make_app(sidecar, job.model, job.token, asked_to_go.set, mounted, metrics_token=job.metrics_token),
            log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=int(HTTP_STOP_S),
            timeout_keep_alive=KEEP_ALIVE_S,
        ))  # fmt: skip
        serving = asyncio.create_task(http.serve([listener]))
        running = asyncio.create_task(sidecar.run(job.config.max_restarts))
        leaving = asyncio.create_task(asked_to_go.wait())
        bounding = asyncio.create_task(_bound_logs(logs))
        logger.info("rollout server %s at %s", job.name, url)
        try:
            await asyncio.wait({serving, running, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            bounding.cancel()
            await _leave(sidecar, running, http, serving, job.drain_s)
            try:
                if mounted is not None:
                    await mounted.close()
            finally:
                await fetcher.close()
        for task in (running, serving):
            if not task.cancelled():
                task.result()


def _fetcher(job: ServerJob) -> MergingFetch:
    folder, config = job.fetch_dir or job.log_dir / f"weights-of-{job.name}", job.config
    return MergingFetch(
        Fetcher(folder, job.token, job.host), folder / "merged", job.model, config.dtype, config.threads
    )


async def _leave(
    sidecar: Sidecar, running: asyncio.Task[None], http: HttpServer, serving: asyncio.Task[None], drain_s: float
) -> None:
    """Registry, requests, engine, HTTP: in this order, so that nobody is sent here any more and nobody is cut off."""
    await sidecar.drain(drain_s)
    running.cancel()
    await asyncio.wait({running})
    http.should_exit = True
    _, late = await asyncio.wait({serving}, timeout=HTTP_STOP_S)
    for task in late:
        task.cancel()
    await asyncio.gather(serving, return_exceptions=True)


async def _bound_logs(folder: Path) -> None:
    while True:
        try:
            await asyncio.to_thread(bound_logs, folder)
        except OSError as error:
            logger.warning("engine logs in %s not bounded: %s", folder, error)
        await asyncio.sleep(LOGS_S)


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: who calls `serve` decides what a signal means."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            message = f"{host}:{port} is in use; set rollout.port to a free port, or to 0 for any"
            raise OSError(error.errno, message) from error
        raise
    listener.listen(1024)
    return listener


def url_host(host: str) -> str:
    """What others connect to: an address that means "all interfaces" is reached by this machine's name."""
    host = socket.gethostname() if host in ("0.0.0.0", "::") else host  # noqa: S104 (not a binding)
    return f"[{host}]" if ":" in host else host


MOST_BYTES = 16 << 20
KEPT = 2


def bound_logs(folder: Path, most_bytes: int = MOST_BYTES) -> None:
    """Move every ``*.log`` of `folder` aside that is longer than `most_bytes`; at most `KEPT` older ones stay."""
    for log in folder.glob("*.log"):
        if log.stat().st_size > most_bytes:
            _move_aside(log)


def _move_aside(log: Path) -> None:
    for number in range(KEPT, 1, -1):
        older = log.with_name(f"{log.name}.{number - 1}")
        if older.exists():
            older.replace(log.with_name(f"{log.name}.{number}"))
    shutil.copyfile(log, log.with_name(f"{log.name}.1"))
    os.truncate(log, 0)
