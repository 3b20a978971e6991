"""What `penstock run` writes for Prometheus, and that all of it is gone afterwards."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path

import httpx
import pytest

from penstock.deploy import RunDir, parse_config
from penstock.deploy.telemetry.metrics import MetricsTarget, RoleState, announced, head_served, target_list
from penstock.transfer_queue import ServerInfo


@pytest.fixture
def run(tmp_path) -> RunDir:
    (tmp_path / "mine").mkdir()
    return RunDir(tmp_path / "mine")


def config_of(run: RunDir):
    tree = {"name": "mine", "runs_dir": str(run.root.parent), "model": "m", "data": {"train": "generate:x"}}
    return parse_config({**tree, "sandbox": {"backend": "remote", "url": "http://box:8700"}}, "test")


async def targets_with(run: RunDir, count: int) -> dict[str, str]:
    """name → address, once so many are listed"""
    async with asyncio.timeout(60):
        while True:
            if run.prometheus_targets.exists():
                found = json.loads(run.prometheus_targets.read_text())
                if len(found) == count:
                    return {entry["labels"]["name"]: entry["targets"][0] for entry in found}
            await asyncio.sleep(0.05)


async def test_targets_follow_the_run_and_end_with_it(run, queue, tmp_path) -> None:
    dead = RoleState("agent-0", "not running", 2)
    run.metric_addresses.mkdir()
    (run.metric_addresses / "of-a-killed-life.json").write_text("{}")
    async with head_served(config_of(run), run, "the run's", queue, lambda: [dead], every_s=0.05):
        assert stat.S_IMODE(run.metrics_token.stat().st_mode) == 0o600
        assert "the run's" not in run.metrics_token.read_text()
        assert set(await targets_with(run, 2)) == {"head", "sandbox"}
        await queue.heartbeat(ServerInfo("rollout-7", "http://10.0.0.7:8101", 0))
        with announced(run.metric_addresses, MetricsTarget("127.0.0.1:5", "mine", "agent", "agent-0")):
            found = await targets_with(run, 4)
            assert (found["rollout-7"], found["sandbox"]) == ("10.0.0.7:8101", "box:8700")
        assert set(await targets_with(run, 3)) == {"head", "sandbox", "rollout-7"}
        text = await scraped(found["head"], run.metrics_token.read_text())
        assert 'penstock_run_role_up{process="agent-0",run="mine"} 0.0' in text
        assert 'penstock_run_role_restarts_total{process="agent-0",run="mine"} 2.0' in text
        assert 'penstock_queue_server_version_lag{run="mine",server="rollout-7"} 0.0' in text
    assert not run.prometheus_targets.exists()
    assert not run.metrics_token.exists()
    assert list(run.metric_addresses.iterdir()) == []


async def scraped(address: str, token: str) -> str:
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {token}"}) as http, asyncio.timeout(60):
        while "version_lag{" not in (text := (await http.get(f"http://{address}/metrics")).text):
            await asyncio.sleep(0.05)
    return text


def test_an_address_is_listed_once(tmp_path: Path) -> None:
    servers = [ServerInfo("s0", "http://a:1", 0), ServerInfo("s0-again", "http://a:1", 0)]
    assert [entry["targets"] for entry in target_list(tmp_path, "mine", servers)] == [["a:1"]]
