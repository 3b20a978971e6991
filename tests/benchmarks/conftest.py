"""Benchmarks are run as a user runs them, only shorter."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.deploy import app

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # for benchmarks.support, as `penstock bench` does

Measure = Callable[..., Awaitable[dict[str, Any]]]


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Measure:
    """`await measure("queue", PENSTOCK_BENCH_ROUNDS="1")` → the JSON that `penstock bench queue --json` prints."""

    async def run(name: str, **environment: str) -> dict[str, Any]:
        for variable, value in environment.items():
            monkeypatch.setenv(variable, value)
        result = await asyncio.to_thread(CliRunner().invoke, app, ["bench", name, "--json"])
        assert result.exit_code == 0, result.output
        measured: dict[str, Any] = json.loads(result.stdout)
        assert measured["bench"] == name
        assert set(measured) == {"bench", "ratio", "figures", "setup"}
        return measured

    return run
