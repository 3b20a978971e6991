"""What `penstock run` itself tells Prometheus: the queue's numbers, its roles, and where the others are.

poll, every `EVERY_S`: queue ──► gauges (exporter.py); registry, runs/NAME/metrics/ ──► prometheus-targets.json
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.deploy.config import RunConfig
from penstock.deploy.crew import Member
from penstock.deploy.exporter import QueueExporter
from penstock.deploy.link import Link
from penstock.deploy.run_dir import RunDir
from penstock.deploy.telemetry.access import metrics_token
from penstock.deploy.telemetry.addresses import Target, target_list, write_targets, write_token
from penstock.deploy.telemetry.served import metrics_served
from penstock.transfer_queue import TransferQueue

logger = logging.getLogger(__name__)
EVERY_S = 5.0
HEAD = "head"
Members = Callable[[], Sequence[Member]]
"""Asked at every scrape: servers and workers come and go."""


class RoleGauges(Collector):
    """Which of the processes that `penstock run` started are up, and how often each was started again."""

    def __init__(self, run: str, members: Members) -> None:
        self._run = run
        self._members = members

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("penstock_run_role_up", "1: its process runs", labels=["run", "process"])
        restarts = CounterMetricFamily(
            "penstock_run_role_restarts", "Starts after the first one", labels=["run", "process"]
        )
        for member in self._members():
            up.add_metric([self._run, member.spec.name], float(member.state.startswith("running")))
            restarts.add_metric([self._run, member.spec.name], member.restarts)
        yield up
        yield restarts


def head_exporter(queue: TransferQueue, run: str, members: Members, every_s: float) -> QueueExporter:
    """The queue's exporter with the head's own numbers in its registry."""
    exporter = QueueExporter(queue, run, every_s)
    exporter.registry.register(RoleGauges(run, members))
    ProcessCollector(namespace="penstock", registry=exporter.registry)
    return exporter


@contextlib.asynccontextmanager
async def head_served(
    config: RunConfig, run: RunDir, link: Link, queue: TransferQueue, members: Members
) -> AsyncIterator[None]:
    """For the length of the block. What is written for Prometheus is gone afterwards."""
    if not config.telemetry.metrics:
        yield
        return
    exporter = head_exporter(queue, config.name, members, EVERY_S)
    write_token(run.metrics_token, metrics_token(link.token))
    _forget_addresses(run)
    who = Target("", config.name, HEAD, HEAD)
    async with metrics_served(config.telemetry, exporter.registry, link.token, run.metric_addresses, who):
        tasks = [asyncio.create_task(exporter.poll()), asyncio.create_task(_keep_targets(config, run, exporter))]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            run.prometheus_targets.unlink(missing_ok=True)
            run.metrics_token.unlink(missing_ok=True)
            _forget_addresses(run)


async def _keep_targets(config: RunConfig, run: RunDir, exporter: QueueExporter) -> None:
    told = ""
    while True:
        try:
            targets = target_list(run.metric_addresses, config.name, exporter.servers, config.sandbox.url)
            await asyncio.to_thread(write_targets, run.prometheus_targets, targets)
        except (OSError, ValueError) as error:  # a full disk; a file that is half there on a shared one
            if str(error) != told:
                logger.warning("%s: %s", run.prometheus_targets, error)
            told = str(error)
        await asyncio.sleep(min(EVERY_S, 1.0))


def _forget_addresses(run: RunDir) -> None:
    """Those of an earlier life, whose roles were killed."""
    for path in run.metric_addresses.glob("*.json"):
        path.unlink(missing_ok=True)
