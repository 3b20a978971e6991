"""Logs that are rotated while they are written."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from tests.until import until

from penstock.common import keep_logs_bounded
from penstock.common.log_files import KEPT_LOGS, bound_logs


def test_logs_are_rotated_and_bounded(tmp_path: Path) -> None:
    log = tmp_path / "engine-hf.log"
    log.touch(mode=0o600)
    with log.open("ab") as written_to:
        for life in range(6):
            written_to.write(b"%d" % life * 100)
            written_to.flush()
            bound_logs(tmp_path, max_bytes=150)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["engine-hf.log", *(f"engine-hf.log.{number}" for number in range(1, KEPT_LOGS + 1))]
    assert log.read_bytes() == b""
    assert [(tmp_path / f"engine-hf.log.{number}").read_bytes()[:1] for number in (1, 2)] == [b"4", b"2"]
    assert all(path.stat().st_size <= 250 for path in tmp_path.iterdir())
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


async def test_the_logs_of_a_run_are_bounded_while_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.common.log_files.LOGS_S", 0.01)
    log = tmp_path / "trainer.log"
    log.touch()
    os.truncate(log, 20 << 20)
    bounding = asyncio.create_task(keep_logs_bounded(tmp_path))
    await until(lambda: log.stat().st_size == 0)
    bounding.cancel()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trainer.log", "trainer.log.1"]
