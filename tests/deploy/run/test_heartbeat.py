"""The heartbeat file of a role: touched while its event loop runs, and not afterwards."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from penstock.deploy.run.roles import run_role


async def _touched(file: Path) -> None:
    async with asyncio.timeout(60):
        while not file.exists():
            await asyncio.sleep(0.01)


def test_heartbeat_while_the_role_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "beat"
    monkeypatch.setenv("PENSTOCK_HEARTBEAT", str(file))
    monkeypatch.setattr("penstock.deploy.run.roles.HEARTBEAT_S", 0.01)

    async def role() -> None:
        for _ in range(3):
            await _touched(file)
            file.unlink()

    run_role(role)
    file.unlink(missing_ok=True)
    time.sleep(0.1)  # nothing to wait for: that it is not touched any more shows only in time
    assert not file.exists()


def test_heartbeat_needs_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_HEARTBEAT", raising=False)
    monkeypatch.chdir(tmp_path)
    run_role(lambda: asyncio.sleep(0.05))
    assert not list(tmp_path.iterdir())
