"""Who is let in: every route of the schema and every path that is none, with no token and with wrong ones."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from tests.rollout_server.conftest import HEADERS, TOKEN, RunningServer, StubQueue, rollout_server

WRONG = ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}, {"Authorization": "Bearer é"})


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RunningServer]:
    async with rollout_server(StubQueue(), tmp_path) as running:
        yield running


async def test_every_route_refuses_a_missing_and_a_wrong_token(server: RunningServer) -> None:
    async with httpx.AsyncClient(timeout=60) as http:
        paths = (await http.get(f"{server.url}/openapi.json", headers=HEADERS)).json()["paths"]
        asked = [(method, path) for path, operations in paths.items() for method in operations]
        assert {("post", "/generate"), ("post", "/weights"), ("post", "/drain"), ("get", "/v1/models")} <= set(asked)
        for method, path in [*asked, ("get", "/openapi.json"), ("get", "/nothing"), ("delete", "/health")]:
            for headers in WRONG:
                encoded = {key: value.encode("latin-1") for key, value in headers.items()}
                url = server.url + path.replace("{", "").replace("}", "")
                response = await http.request(method, url, headers=encoded, json={"token_ids": [1]})
                assert response.status_code == 401, (method, path)
                assert response.json()["error"]["field"] == "authorization"
                assert response.headers["www-authenticate"] == "Bearer"
    assert not server.task.done()


async def test_the_token_for_metrics_opens_them_alone(tmp_path: Path) -> None:
    headers = {"Authorization": "Bearer for metrics"}
    async with (
        rollout_server(StubQueue(), tmp_path, metrics_token="for metrics") as running,
        httpx.AsyncClient(timeout=60, headers=headers) as http,
    ):
        found = await http.get(f"{running.url}/metrics")
        assert (found.status_code, "penstock_rollout_in_flight" in found.text) == (200, True)
        for method, path in (("get", "/health"), ("post", "/generate"), ("post", "/drain"), ("get", "/metrics/")):
            assert (await http.request(method, running.url + path, json={})).status_code == 401, path
