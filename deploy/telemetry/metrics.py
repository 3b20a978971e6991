"""Metrics of every role for Prometheus, spans for OpenTelemetry, and the queue's exporter.

    role ──announced──► runs/NAME/metrics/NAME.json ─┐
    rollout servers, in the queue's registry ───────┼──► runs/NAME/prometheus-targets.json
    sandbox.url ─────────────────────────────────────┘
    penstock run: poll the queue every `EVERY_S` ──► gauges; targets file
    penstock queue export: poll the queue ──► GET /metrics

A role on another machine is listed if both share the runs folder; otherwise add its address by hand. Prometheus sends
the run's token, or the one for metrics only, with ``authorization: {credentials: TOKEN}`` of its scrape configuration.

Spans follow OpenTelemetry's standard environment variables, and are off without a collector:

    OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318 penstock run RECIPE

Text of prompts, answers and tools: OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=true.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.types import ASGIApp

from penstock.common import (
    HttpServer,
    cancel_and_wait,
    counter_family,
    gauge_family,
    listen,
    metrics_token,
    url_host,
    write_atomically,
)
from penstock.common.prometheus import metrics_app
from penstock.common.tracing import export_spans
from penstock.deploy.config import RunConfig, TelemetryConfig
from penstock.deploy.run_dir import RunDir
from penstock.transfer_queue import QueueError, QueueGauges, RequestLog, ServerInfo, Status, TransferQueue

if TYPE_CHECKING:
    import socket

logger = logging.getLogger(__name__)
EVERY_S = 5.0
STOP_S = 2


@dataclass(frozen=True, slots=True)
class RoleState:
    """A process of the run as its supervisor sees it."""

    name: str
    state: str
    """Begins with ``running`` while the process runs."""
    restarts: int


Roles = Callable[[], Sequence[RoleState]]
"""Called at every scrape, because servers and workers come and go."""


# targets -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class MetricsTarget:
    """A process that serves metrics."""

    address: str
    """host:port"""
    run: str
    role: str
    name: str
    """Name of the process: ``agent-0``."""

    def plain(self) -> dict[str, Any]:
        """An entry of Prometheus' file-based discovery."""
        return {"targets": [self.address], "labels": {"run": self.run, "role": self.role, "name": self.name}}


@contextlib.contextmanager
def announced(folder: Path, target: MetricsTarget) -> Iterator[None]:
    """Writes the role's file, and removes it at the end. After kill -9 it stays, so Prometheus shows the role down."""
    path = folder / f"{target.name}.json"
    try:
        folder.mkdir(exist_ok=True)  # without parents: a run whose folder is on another machine gets none here
        write_atomically(path, json.dumps(target.plain()) + "\n")
    except OSError as error:
        logger.info("metrics of %s at %s; not listed in %s: %s", target.name, target.address, folder, error)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def target_list(
    folder: Path, run: str, servers: Sequence[ServerInfo] = (), sandbox_url: str | None = None
) -> list[dict[str, Any]]:
    """All known targets, ordered, each address once."""
    targets = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    targets += [MetricsTarget(urlsplit(s.url).netloc, run, "rollout", s.server_id).plain() for s in servers]
    if sandbox_url:
        targets.append(MetricsTarget(urlsplit(sandbox_url).netloc, run, "sandbox", "sandbox").plain())
    return list({entry["targets"][0]: entry for entry in targets}.values())


# a role's metrics --------------------------------------------------------------------------------------------------
@contextlib.asynccontextmanager
async def metrics_served(
    config: TelemetryConfig, registry: CollectorRegistry, token: str, folder: Path, who: MetricsTarget
) -> AsyncIterator[None]:
    """Serves `registry` for the length of the block and lists it in `folder`; `who.address` is filled in here.

    If no port is free, logs a warning and continues without.
    """
    listener = _listen(config) if config.metrics else None
    if listener is None:
        yield
        return
    address = f"{url_host(config.host)}:{listener.getsockname()[1]}"
    app = metrics_app(registry, token)
    async with HttpServer(app, listener, lifespan="off", stop_s=STOP_S, deadline_s=2 * STOP_S):
        logger.info("metrics of %s at http://%s/metrics", who.name, address)
        with announced(folder, MetricsTarget(address, who.run, who.role, who.name)):
            yield


def _listen(config: TelemetryConfig) -> socket.socket | None:
    """Listen on the first free port. Returns None, with a warning, if there is none."""
    ports = min(32, 65536 - config.port) if config.port else 1
    try:
        return listen(config.host, config.port, ports=ports)
    except OSError as error:
        logger.warning("no metrics: no port on %s from %d on: %s", config.host, config.port, error.strerror)
        return None


async def with_spans(role: str, run: str, name: str, work: Awaitable[None]) -> None:
    """Runs `work` and exports its spans meanwhile to the collector of the environment."""
    facts = {"penstock.run": run, "penstock.role": role}
    async with export_spans(f"penstock-{role}", {"penstock.run": run}, instance=name, facts=facts):
        await work


# the queue's exporter ----------------------------------------------------------------------------------------------
class QueueExporter:
    """Keeps the newest status. An unreachable queue exports no gauges, so that alerts on absence fire."""

    def __init__(self, queue: TransferQueue, run: str, every_s: float) -> None:
        self._queue = queue
        self._every_s = every_s
        self.newest: Status | None = None
        """None: the queue did not answer."""
        self.servers: list[ServerInfo] = []
        self.registry = CollectorRegistry()
        self.registry.register(QueueGauges(run, lambda: self.newest, lambda: self.servers))

    async def poll(self) -> None:
        """Runs until cancelled."""
        while True:
            try:
                self.newest, self.servers = await self._queue.status(), await self._queue.servers()
            except QueueError as error:
                logger.warning("queue: %s", error)
                self.newest = None
            await asyncio.sleep(self._every_s)


def make_app(exporter: QueueExporter, token: str) -> ASGIApp:
    """``GET /metrics`` of an exporter that polls while the app runs."""

    @contextlib.asynccontextmanager
    async def polling(_: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(exporter.poll(), name="poll the queue")
        try:
            yield
        finally:
            await cancel_and_wait([task])

    return metrics_app(exporter.registry, token, polling)


# the head's metrics ------------------------------------------------------------------------------------------------
class RoleGauges(Collector):
    """Which processes of `penstock run` are up, and how often each was restarted."""

    def __init__(self, run: str, roles: Roles) -> None:
        self._run = run
        self._roles = roles

    def collect(self) -> Iterator[Metric]:
        roles = self._roles()
        labels = ["run", "process"]
        up = [((self._run, role.name), float(role.state.startswith("running"))) for role in roles]
        yield gauge_family("penstock_run_role_up", "1: its process runs", labels, up)
        restarts = [((self._run, role.name), role.restarts) for role in roles]
        yield counter_family("penstock_run_role_restarts", "Starts after the first one", labels, restarts)


class RequestCounts(Collector):
    """Requests of each owner as Redis has them; none while Redis is away."""

    def __init__(self, newest: Mapping[str, Mapping[str, int]] | None = None) -> None:
        """`newest`: as `RequestLog.counts` returns them."""
        self._newest = newest or {}

    async def follow(self, requests: RequestLog, say: Callable[[str], None], every_s: float = 5.0) -> None:
        """Reads them until it is cancelled. `say` gets one line for each change."""
        last = ""
        while True:
            try:
                self._newest = await requests.counts()
            except QueueError as error:
                logger.warning("counts of requests: %s", error)
                self._newest = {}
            if (line := self._line()) not in ("", last):
                say(line)
                last = line
            await asyncio.sleep(every_s)

    def _line(self) -> str:
        """Empty before the first request."""
        waiting, done = self._newest.get("waiting", {}), self._newest.get("done", {})
        parts = [f"{owner}: {done.get(owner, 0)} requests done, {waits} wait" for owner, waits in waiting.items()]
        return "; ".join(parts)

    def collect(self) -> Iterator[Metric]:
        waiting, done = self._newest.get("waiting", {}), self._newest.get("done", {})
        text = "Accepted requests without a result"
        yield gauge_family("penstock_service_waiting_requests", text, ["owner"], waiting)
        text, waiting = "Their bytes, expected results of samples included", self._newest.get("bytes", {})
        yield gauge_family("penstock_service_waiting_bytes", text, ["owner"], waiting)
        text = "Requests that got a result, ever"
        yield counter_family("penstock_service_done_requests", text, ["owner"], done)


def head_exporter(
    queue: TransferQueue, run: str, roles: Roles, every_s: float, further: Iterable[Collector] = ()
) -> QueueExporter:
    """The queue's exporter with the head's own metrics, and `further` ones, in its registry."""
    exporter = QueueExporter(queue, run, every_s)
    for collector in (RoleGauges(run, roles), *further):
        exporter.registry.register(collector)
    ProcessCollector(namespace="penstock", registry=exporter.registry)
    return exporter


@contextlib.asynccontextmanager
async def head_served(  # noqa: PLR0917 - what `penstock run` has at its start
    config: RunConfig,
    run: RunDir,
    token: str,
    queue: TransferQueue,
    roles: Roles,
    every_s: float = EVERY_S,
    further: Iterable[Collector] = (),
) -> AsyncIterator[None]:
    """Serves the head's metrics for the length of the block. Files written for Prometheus are removed afterwards."""
    if not config.telemetry.metrics:
        yield
        return
    exporter = head_exporter(queue, config.name, roles, every_s, further)
    write_atomically(run.metrics_token, metrics_token(token), mode=0o600)
    _remove_addresses(run)
    who = MetricsTarget("", config.name, "head", "head")
    async with metrics_served(config.telemetry, exporter.registry, token, run.metric_addresses, who):
        tasks = [
            asyncio.create_task(exporter.poll()),
            asyncio.create_task(_update_targets(config, run, exporter, every_s)),
        ]
        try:
            yield
        finally:
            await cancel_and_wait(tasks)
            run.prometheus_targets.unlink(missing_ok=True)
            run.metrics_token.unlink(missing_ok=True)
            _remove_addresses(run)


async def _update_targets(config: RunConfig, run: RunDir, exporter: QueueExporter, every_s: float) -> None:
    logged, written = "", ""
    while True:
        try:
            targets = target_list(run.metric_addresses, config.name, exporter.servers, config.sandbox.url)
            text = json.dumps(targets, indent=2) + "\n"
            if text != written:  # Prometheus reads the file at every change
                await asyncio.to_thread(write_atomically, run.prometheus_targets, text)
                written = text
        except (OSError, ValueError) as error:  # a full disk; a partly written file on a shared one
            if str(error) != logged:
                logger.warning("%s: %s", run.prometheus_targets, error)
            logged = str(error)
        await asyncio.sleep(min(every_s, 1.0))


def _remove_addresses(run: RunDir) -> None:
    """Also those of roles of an earlier life that were killed."""
    for path in run.metric_addresses.glob("*.json"):
        path.unlink(missing_ok=True)
