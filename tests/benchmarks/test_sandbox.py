"""The sandbox benchmark runs to its end and says what it promises; what it measures is not judged here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

Measure = Callable[..., Awaitable[dict[str, Any]]]
SHORT = {"PENSTOCK_BENCH_ROUNDS": "1", "PENSTOCK_BENCH_SAMPLES": "1"}
RATIOS = {"session_exec", "session_exec_python", "start", "exec", "boxes_per_s"}


@pytest.mark.bwrap
async def test_boxes_of_bubblewrap_here_and_behind_a_server(measure: Measure) -> None:
    await _check(measure, ["bwrap", "remote"])


@pytest.mark.docker
async def test_containers(measure: Measure) -> None:
    await _check(measure, ["docker"])


async def test_a_backend_that_cannot_work_here_is_named(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    measured = await measure("sandbox", **SHORT, PENSTOCK_BENCH_BACKENDS="docker")
    assert "DOCKER_HOST" in measured["setup"]["missing"]["docker"]
    assert measured["ratio"]["session_exec_over_bare"] == measured["figures"] == {}


async def _check(measure: Measure, backends: list[str]) -> None:
    measured = await measure("sandbox", **SHORT, PENSTOCK_BENCH_BACKENDS=",".join(backends))
    if "docker" in (missing := measured["setup"]["missing"]):
        pytest.skip(f"{missing['docker']} (scripts/setup-docker)")
    assert missing == {}
    assert set(measured["ratio"]) == {f"{name}_over_bare" for name in RATIOS}
    for by_backend in measured["ratio"].values():
        assert list(by_backend) == backends
        assert all(value > 0 for value in by_backend.values())
    for figures in measured["figures"].values():
        assert 0 < figures["session_exec_p50_ms"] <= figures["session_exec_p99_ms"]
        assert 0 < figures["bare_exec_p50_ms"] <= figures["bare_exec_p99_ms"]
