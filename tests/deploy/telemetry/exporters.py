"""Each role's own registry, fed so that every family has a sample."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry

from penstock.agent_loops import WorkerMetrics
from penstock.deploy.telemetry.metrics import RequestCounts, RoleState, head_exporter
from penstock.rollout_server import RolloutConfig, RolloutMetrics
from penstock.sandbox.server import SandboxMetrics
from penstock.service import ServiceContext, ServiceJob
from penstock.testing import MemoryTransferQueue
from penstock.trainer import TrainerConfig, TrainerMetrics
from penstock.transfer_queue import ClientRequest, LengthDecile, RunContext, ServerInfo, Status

STATUS = Status(
    3, 4, 2, {"ready": 1}, {"queued": 2}, 100,
    waits_s={"trainer:batch": 1.0}, workers={"agent-0": 2}, ages_s={"ready": 0.5}, over_age=[LengthDecile(10, 2, 1)],
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    kind: str
    labels: frozenset[str]
    samples: frozenset[str]
    """Names in PromQL: ``…_bucket`` and its like."""


def families(registry: CollectorRegistry) -> dict[str, Family]:
    """By the name that people use: with ``_total`` for counters, without a suffix for histograms."""
    found = {}
    for family in registry.collect():
        samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
        labels = frozenset(label for sample in samples for label in sample.labels) - {"le"}
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found[name] = Family(family.type, labels, frozenset(sample.name for sample in samples))
    return found


def exporters() -> dict[str, dict[str, Family]]:
    """Role → its families."""
    registries = {"head": _head(), "trainer": _trainer(), "agent": _agent(), "rollout": _rollout()}
    registries |= {"sandbox": _sandbox(), "service": _service(), "api": _api()}
    return {role: families(registry) for role, registry in registries.items()}


def _head() -> CollectorRegistry:
    counts = RequestCounts({"waiting": {"alice": 1}, "bytes": {"alice": 9}, "done": {"alice": 2}})
    roles = [RoleState("agent-0", "running", 0)]
    exporter = head_exporter(MemoryTransferQueue(), "mine", lambda: roles, 1.0, further=[counts])
    exporter.newest, exporter.servers = STATUS, [ServerInfo("s0", "http://a", 1)]
    return exporter.registry


def _trainer() -> CollectorRegistry:
    metrics = TrainerMetrics()
    metrics.step(1, {"step": 0, "reward": 0.5, "wall_s": 1.0, "wait_s": 0.1, "train_s": 0.9, "tokens": 5})
    return metrics.registry


def _agent() -> CollectorRegistry:
    metrics = WorkerMetrics()
    for kind in ("model", "tool", "reward"):
        metrics.span(kind, "python", 0.1)
    metrics.episodes.labels("completed").inc()
    metrics.waited.labels("server").inc(1.0)
    return metrics.registry


def _rollout() -> CollectorRegistry:
    metrics = RolloutMetrics()
    metrics.requests.labels("stop").inc()
    return metrics.registry


def _service() -> CollectorRegistry:
    run = RunContext(queue=MemoryTransferQueue(), model="", token="")
    metrics = ServiceJob(run, TrainerConfig(), RolloutConfig(), Path(), Path(), "m").metrics
    request = ClientRequest("alice", "sample", b"", "sampler:s", 1)
    metrics.ended(request, "done", metrics.started(request))
    metrics.samples.labels("alice").inc()
    metrics.tokens.labels("alice", "sampled").inc()
    return metrics.registry


def _api() -> CollectorRegistry:
    metrics = ServiceContext(None, Path(), "m", 1, "").metrics  # type: ignore[arg-type]
    metrics.refusals.labels("quota").inc()
    return metrics.registry


def _sandbox() -> CollectorRegistry:
    metrics = SandboxMetrics()
    with metrics.call("run"):
        metrics.boxes.labels("warm").set(1)
    metrics.count_boxes({"taken_warm": 1})
    return metrics.registry
