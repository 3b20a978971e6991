"""Metrics of a role and of the head over HTTP: who may read them, the queue's gauges, and Prometheus' targets."""

from __future__ import annotations

import asyncio
import json
import logging
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from penstock.common import metrics_token
from penstock.deploy import RunConfig, RunDir, parse_config
from penstock.deploy.config import TelemetryConfig
from penstock.deploy.telemetry.metrics import (
    MetricsTarget,
    RoleState,
    announced,
    head_served,
    metrics_served,
    target_list,
)
from penstock.testing import MemoryTransferQueue
from penstock.transfer_queue import Limits, QueueUnavailable, ServerInfo, Task

TOKEN = "the run's"
WHO = MetricsTarget("", "mine", "agent", "agent-0")


@pytest.fixture
async def queue() -> MemoryTransferQueue:
    queue = MemoryTransferQueue()
    await queue.create_run(Limits(group_size=2, groups_per_step=1, max_staleness=1), "x")
    return queue


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("penstock_agent_episodes", "Episodes", registry=registry).inc(3)
    return registry


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "mine").mkdir()
    return RunDir(tmp_path / "mine")


def config_of(run: RunDir) -> RunConfig:
    tree = {"name": "mine", "runs_dir": str(run.root.parent), "model": "m", "data": {"train": "generate:x"}}
    return parse_config({**tree, "sandbox": {"backend": "remote", "url": "http://box:8700"}}, "test")


def target_in(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("*.json")
    target: dict[str, Any] = json.loads(path.read_text())
    return target


async def get(address: str, token: str, path: str = "/metrics") -> httpx.Response:
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {token}"}) as http:
        return await http.get(f"http://{address}{path}")


async def until_scraped(address: str, token: str, condition: Callable[[str], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition((await get(address, token)).text):
            await asyncio.sleep(0.05)


async def test_the_runs_token_and_the_one_for_metrics_open_a_role(run: RunDir, registry: CollectorRegistry) -> None:
    folder = run.metric_addresses
    async with metrics_served(TelemetryConfig(), registry, TOKEN, folder, WHO):
        target = target_in(folder)
        assert target["labels"] == {"run": "mine", "role": "agent", "name": "agent-0"}
        (address,) = target["targets"]
        assert address.startswith("127.0.0.1:")
        for token in (TOKEN, metrics_token(TOKEN)):
            answer = await get(address, token)
            assert (answer.status_code, "penstock_agent_episodes_total 3.0" in answer.text) == (200, True)
        refused = [("another", "/metrics", 401), (metrics_token(TOKEN), "/else", 401), (TOKEN, "/else", 404)]
        assert [(await get(address, token, path)).status_code for token, path, _ in refused] == [c for *_, c in refused]
        # The next role finds its port taken, and its run's folder elsewhere.
        (run.root / "taken").mkdir()
        settings, taken = TelemetryConfig(port=int(address.rpartition(":")[2])), run.root / "taken" / "metrics"
        async with metrics_served(settings, registry, TOKEN, taken, WHO):
            (address_of_next,) = target_in(taken)["targets"]
            assert settings.port < int(address_of_next.rpartition(":")[2]) < settings.port + 32
        async with metrics_served(TelemetryConfig(), registry, TOKEN, run.root / "elsewhere" / "metrics", WHO):
            assert not (run.root / "elsewhere").exists()
    assert list(folder.iterdir()) == []
    with pytest.raises(httpx.TransportError):
        await get(address, TOKEN)


@pytest.mark.parametrize(
    ("settings", "warning"), [({"host": "192.0.2.1", "port": 9}, "no port on 192.0.2.1"), ({"metrics": False}, "")]
)
async def test_a_role_goes_on_without_metrics(run: RunDir, registry: CollectorRegistry, caplog, settings, warning):
    with caplog.at_level(logging.WARNING):
        async with metrics_served(TelemetryConfig(**settings), registry, TOKEN, run.metric_addresses, WHO):
            assert not run.metric_addresses.exists()
    assert warning in caplog.text


async def targets_with(run: RunDir, count: int) -> dict[str, str]:
    """name → address, once so many are listed"""
    async with asyncio.timeout(60):
        while True:
            if run.prometheus_targets.exists():
                targets = json.loads(run.prometheus_targets.read_text())
                if len(targets) == count:
                    return {entry["labels"]["name"]: entry["targets"][0] for entry in targets}
            await asyncio.sleep(0.05)


async def test_targets_and_gauges_follow_the_run_and_end_with_it(
    run: RunDir, queue: MemoryTransferQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = RoleState("agent-0", "not running", 2)
    run.metric_addresses.mkdir()
    (run.metric_addresses / "of-a-killed-life.json").write_text("{}")
    async with head_served(config_of(run), run, TOKEN, queue, lambda: [dead], every_s=0.05):
        token = run.metrics_token.read_text()
        assert stat.S_IMODE(run.metrics_token.stat().st_mode) == 0o600
        assert TOKEN not in token
        assert set(await targets_with(run, 2)) == {"head", "sandbox"}
        await queue.heartbeat(ServerInfo("rollout-7", "http://10.0.0.7:8101", 0))
        with announced(run.metric_addresses, MetricsTarget("127.0.0.1:5", "mine", "agent", "agent-0")):
            targets = await targets_with(run, 4)
            assert (targets["rollout-7"], targets["sandbox"]) == ("10.0.0.7:8101", "box:8700")
        assert set(await targets_with(run, 3)) == {"head", "sandbox", "rollout-7"}
        await queue.submit([Task("train/0", "train", [{"role": "user", "content": "?"}], "test", "1")])
        lines = (
            'penstock_run_role_up{process="agent-0",run="mine"} 0.0',
            'penstock_run_role_restarts_total{process="agent-0",run="mine"} 2.0',
            'penstock_queue_server_version_lag{run="mine",server="rollout-7"} 0.0',
            'penstock_queue_groups{run="mine",state="queued"} 1.0',
        )
        await until_scraped(targets["head"], token, lambda text: all(line in text for line in lines))
        assert (await get(targets["head"], "another")).status_code == 401

        async def away() -> None:
            raise QueueUnavailable("status: no answer")

        monkeypatch.setattr(queue, "status", away)
        await until_scraped(targets["head"], token, lambda text: "penstock_queue" not in text)
    assert not run.prometheus_targets.exists()
    assert not run.metrics_token.exists()
    assert list(run.metric_addresses.iterdir()) == []


def test_an_address_is_listed_once(tmp_path: Path) -> None:
    servers = [ServerInfo("s0", "http://a:1", 0), ServerInfo("s0-again", "http://a:1", 0)]
    assert [entry["targets"] for entry in target_list(tmp_path, "mine", servers)] == [["a:1"]]
    assert len({metrics_token("a"), metrics_token("a"), metrics_token("b")}) == 2
