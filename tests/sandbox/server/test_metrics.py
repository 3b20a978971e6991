"""Who may look at a sandbox server's numbers, and that they only grow where they count."""

from __future__ import annotations

import httpx

from penstock.sandbox import SandboxConfig
from penstock.sandbox.server import SandboxMetrics, build_app
from penstock.testing import FakeSandbox

CONFIG = SandboxConfig(max_boxes=4)


async def test_metrics_token_for_metrics_opens_them_alone() -> None:
    app = build_app(FakeSandbox(), CONFIG, "the run's", "for metrics")
    headers = {"Authorization": "Bearer for metrics"}
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as http:
        found = await http.get("/metrics")
        assert (found.status_code, "penstock_sandbox_waiting 0.0" in found.text) == (200, True)
        assert (await http.get("/health")).status_code == 401
        assert (await http.post("/sessions", json={})).status_code == 401
        assert (await http.get("/metrics", headers={"Authorization": "Bearer "})).status_code == 401


def test_metrics_count_boxes_once() -> None:
    metrics = SandboxMetrics()
    for counts in ({"taken_warm": 2}, {"taken_warm": 2}, {"taken_warm": 3, "stale": 1}):
        metrics.count_boxes(counts)
    value = metrics.registry.get_sample_value
    assert value("penstock_sandbox_pool_boxes_total", {"how": "taken_warm"}) == 3
    assert value("penstock_sandbox_pool_boxes_total", {"how": "stale"}) == 1
