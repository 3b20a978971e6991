"""A role's metrics over HTTP: who may look, where they are, and that a role goes on without them."""

from __future__ import annotations

import json
import logging
import socket

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from penstock.common import metrics_token
from penstock.deploy.config import TelemetryConfig
from penstock.deploy.telemetry.metrics import MetricsTarget, metrics_served

TOKEN = "the run's"
WHO = MetricsTarget("", "mine", "agent", "agent-0")


@pytest.fixture
def registry() -> CollectorRegistry:
    made = CollectorRegistry()
    Counter("penstock_agent_episodes", "Episodes", registry=made).inc(3)
    return made


def listed(folder) -> dict:
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text())


async def status(address: str, token: str, path: str = "/metrics") -> tuple[int, str]:
    async with httpx.AsyncClient() as http:
        answer = await http.get(f"http://{address}{path}", headers={"Authorization": f"Bearer {token}"})
    return answer.status_code, answer.text


async def test_the_runs_token_and_the_one_for_metrics_open_it(tmp_path, registry) -> None:
    folder = tmp_path / "metrics"
    async with metrics_served(TelemetryConfig(), registry, TOKEN, folder, WHO):
        found = listed(folder)
        assert found["labels"] == {"run": "mine", "role": "agent", "name": "agent-0"}
        (address,) = found["targets"]
        assert address.startswith("127.0.0.1:")
        for token in (TOKEN, metrics_token(TOKEN)):
            code, text = await status(address, token)
            assert (code, "penstock_agent_episodes_total 3.0" in text) == (200, True)
        assert (await status(address, "another"))[0] == 401
        assert (await status(address, metrics_token(TOKEN), "/else"))[0] == 401
        assert (await status(address, TOKEN, "/else"))[0] == 404
    assert list(folder.iterdir()) == []
    with pytest.raises(httpx.TransportError):
        await status(address, TOKEN)


async def test_a_taken_port_means_the_next_one(tmp_path, registry) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with metrics_served(TelemetryConfig(port=port), registry, TOKEN, tmp_path / "m", WHO):
            (address,) = listed(tmp_path / "m")["targets"]
            assert port < int(address.rpartition(":")[2]) < port + 32


async def test_a_role_goes_on_without(tmp_path, registry, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        async with metrics_served(TelemetryConfig(host="192.0.2.1", port=9), registry, TOKEN, tmp_path / "m", WHO):
            assert not (tmp_path / "m").exists()
    assert "no metrics: no port on 192.0.2.1" in caplog.text
    async with metrics_served(TelemetryConfig(metrics=False), registry, TOKEN, tmp_path / "m", WHO):
        assert not (tmp_path / "m").exists()


async def test_a_run_whose_folder_is_elsewhere_leaves_none_here(tmp_path, registry) -> None:
    folder = tmp_path / "runs" / "mine" / "metrics"
    async with metrics_served(TelemetryConfig(), registry, TOKEN, folder, WHO):
        assert not folder.exists()
    assert not (tmp_path / "runs").exists()


def test_the_runs_token_is_not_in_the_other_one() -> None:
    assert metrics_token("a") == metrics_token("a") != metrics_token("b")
    assert len(metrics_token("a")) == 64
