"""The reporter of a run beside a disk that fails it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tests.until import until

from penstock.common import cancel_and_wait
from penstock.deploy import RunDir, load_config
from penstock.deploy.run.report import Reporter
from penstock.deploy.run_dir import LivesFile
from penstock.testing import MemoryTransferQueue

RECIPE = Path(__file__).parents[3] / "recipes" / "calculator.yaml"


async def test_a_disk_that_fails_ends_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(RECIPE, [f"runs_dir={tmp_path}", "name=full"])
    run = RunDir.of(config)  # its folder is not there: nothing can be written, as on a full disk
    reporter = Reporter(config, run, MemoryTransferQueue(), [], LivesFile(run.lives))
    said = ""

    def has_said_so() -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return said.count("run full:") == 1 and "not recorded" in said

    reporting = asyncio.create_task(reporter.run())
    await until(has_said_so)
    await asyncio.sleep(1.5)  # another look of the reporter, which says nothing new
    run.root.mkdir()
    await until(run.lives.exists)
    assert not reporting.done()
    said += capsys.readouterr().err
    assert said.count("not recorded") == 1
    assert "lives.json" in said
    assert [life["restarts"] for life in json.loads(run.lives.read_text())] == [{}]
    await cancel_and_wait([reporting])
    reporter.close()
