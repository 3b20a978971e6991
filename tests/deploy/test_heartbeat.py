"""What a health check may believe: the file is touched while the loop turns, by any role, and by nobody afterwards."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.deploy import _until_stopped
from penstock.deploy import roles as heartbeat


async def _touched(file: Path) -> None:
    async with asyncio.timeout(60):
        while not file.exists():
            await asyncio.sleep(0.01)


async def test_a_role_touches_its_file_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "beat"
    monkeypatch.setenv(heartbeat.HEARTBEAT_VARIABLE, str(file))
    monkeypatch.setattr(heartbeat, "HEARTBEAT_S", 0.01)

    async def role() -> None:
        for _ in range(3):
            await _touched(file)
            file.unlink()

    await _until_stopped(role())
    file.unlink(missing_ok=True)
    await asyncio.sleep(0.1)  # nothing to wait for: that it is not touched any more shows only in time
    assert not file.exists()


async def test_without_a_file_there_is_no_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(heartbeat.HEARTBEAT_VARIABLE, raising=False)
    await asyncio.wait_for(heartbeat.beat(), 60)
