"""Ctrl-C twice: the command stops at once, says what is given up, and leaves nothing.

A stopped trainer saves no checkpoint: the second Ctrl-C always comes while the first one waits for it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.deploy.conftest import LivingRun, assert_nothing_left
from typer.testing import CliRunner

from penstock.deploy import app

pytestmark = [pytest.mark.redis, pytest.mark.bwrap, pytest.mark.torch, pytest.mark.timeout(600)]


def test_a_second_interrupt_ends_the_run_without_a_traceback(start_run: Callable[..., LivingRun]) -> None:
    run = start_run("cut", "trainer.steps=100000", "data.eval=null")
    run.wait_for(lambda: run.steps() >= 1)
    pids = run.pids()
    os.kill(run.pids("penstock.deploy.cli train")[0], signal.SIGSTOP)
    run.process.send_signal(signal.SIGINT)
    run.wait_for(lambda: "saving a checkpoint" in run.log.read_text())
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(120) == 130
    text = run.log.read_text()
    assert "SIGINT again: the checkpoint under way is given up" in text
    assert "Traceback" not in text, text
    assert text.rstrip().splitlines()[-1].startswith("interrupted; continue with: penstock run ")
    assert_nothing_left(run, pids)


def test_an_interrupt_before_the_run_began_offers_no_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock.deploy.run.launcher.launch", interrupted)
    done = CliRunner().invoke(app, ["run", "recipes/calculator.yaml", f"runs_dir={tmp_path}", "name=early"])
    assert done.exit_code == 130
    assert done.stderr.rstrip().endswith("interrupted before the run began: nothing is kept")
