"""The next trainer of a run begins when the last one has ended, however it ends; real processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.deploy import RunDir
from penstock.deploy.run.roles import TrainerAlive, sole_trainer

HOLDER = """
import asyncio, pathlib, sys
from penstock.deploy import RunDir
from penstock.deploy.run.roles import sole_trainer
async def hold():
    async with sole_trainer(RunDir(pathlib.Path(sys.argv[1]))):
        print("held", flush=True)
        await asyncio.sleep(600)
asyncio.run(hold())
"""


async def test_the_next_trainer_waits_until_the_last_one_is_dead(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    entered = asyncio.Event()

    async def next_trainer() -> None:
        async with sole_trainer(RunDir(tmp_path)):
            entered.set()

    try:
        assert holder.stdout is not None
        assert await asyncio.to_thread(holder.stdout.readline) == "held\n"
        waiting = asyncio.create_task(next_trainer())
        await asyncio.sleep(0.5)
        assert not entered.is_set()
        holder.kill()
        async with asyncio.timeout(60):
            await waiting
        assert entered.is_set()
    finally:
        holder.kill()
        holder.wait()


async def test_one_that_does_not_end_is_named(tmp_path: Path) -> None:
    async with sole_trainer(RunDir(tmp_path)):
        with pytest.raises(TrainerAlive, match=str(tmp_path)):
            async with sole_trainer(RunDir(tmp_path), wait_s=0.1):
                pass


async def test_other_ranks_of_the_same_trainer_do_not_take_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with sole_trainer(RunDir(tmp_path)):
        monkeypatch.setenv("RANK", "1")
        async with sole_trainer(RunDir(tmp_path), wait_s=0.0):
            assert (tmp_path / "trainer.lock").exists()
