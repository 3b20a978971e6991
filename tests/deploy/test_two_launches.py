"""Two launches of one run at once, on machines that share its folder, where the lock of the first has lapsed."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from penstock.deploy import DataConfig, HeadLease, HeadTaken, RunConfig, launch
from penstock.transfer_queue import RedisServer, TransferQueueConfig

pytestmark = pytest.mark.redis
PASSWORD = "a-test-password"


async def test_launch_is_refused_beside_a_living_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, started, over = iter(("first", "second")), [], asyncio.Event()

    async def run_roles(*_: Any, **__: Any) -> None:
        started.append(len(started))
        await over.wait()

    monkeypatch.setattr("penstock.deploy.launcher._run_roles", run_roles)
    monkeypatch.setattr("penstock.deploy.launcher.RunLock", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr("penstock.deploy.head._head_name", lambda: next(names))  # as in two processes
    monkeypatch.setitem(HeadLease.__init__.__kwdefaults__, "renew_s", 0.05)
    monkeypatch.setitem(HeadLease.__init__.__kwdefaults__, "poll_s", 0.05)
    monkeypatch.setenv("PENSTOCK_REDIS_PASSWORD", PASSWORD)
    (tmp_path / "same").mkdir()
    async with RedisServer(tmp_path / "redis", PASSWORD) as server, asyncio.timeout(60):
        config = RunConfig(
            name="same",
            model="m",
            data=DataConfig(train="t"),
            runs_dir=str(tmp_path),
            transfer_queue=TransferQueueConfig(url=server.url),
        )
        first = asyncio.create_task(launch(config))
        while not started:
            assert not first.done(), first
            await asyncio.sleep(0.01)
        try:
            with pytest.raises(HeadTaken, match="first heads this run"):
                await launch(config)
        finally:
            over.set()
            await asyncio.gather(first, return_exceptions=True)
    assert len(started) == 1
