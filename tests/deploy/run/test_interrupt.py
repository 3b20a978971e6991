"""Ctrl-C twice: the command stops at once, says what is given up, and leaves nothing.

A stopped trainer saves no checkpoint: the second Ctrl-C always comes while the first one waits for it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.deploy.conftest import LivingRun, assert_nothing_left
from typer.testing import CliRunner

from penstock.deploy import app
from penstock.deploy.run.console import drop_without_terminal
from penstock.deploy.run.launcher import Interrupted, ending_signals, until_interrupted

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


@pytest.fixture
def hangup() -> Iterator[None]:
    """SIGHUP as a shell leaves it, also where these tests run below nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_that_ends_stops_the_run_in_order(number: signal.Signals) -> None:
    waiting = asyncio.create_task(until_interrupted(None))
    await asyncio.sleep(0)  # its handlers are installed
    os.kill(os.getpid(), number)
    async with asyncio.timeout(60):
        with pytest.raises(Interrupted):
            await waiting


def test_a_run_below_nohup_is_not_ended_by_its_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signal.getsignal", lambda _: signal.SIG_IGN)
    assert ending_signals() == [signal.SIGTERM]


def test_what_is_printed_to_a_closed_terminal_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, terminal = os.openpty()
    with os.fdopen(terminal, "w") as stream:
        monkeypatch.setattr("sys.stderr", stream)
        os.close(controller)
        drop_without_terminal()
        stream.write("saving a checkpoint\n")  # it would raise EIO


def test_an_interrupt_before_the_run_began_offers_no_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock.deploy.run.launcher.launch", interrupted)
    done = CliRunner().invoke(app, ["run", "recipes/calculator.yaml", f"runs_dir={tmp_path}", "name=early"])
    assert done.exit_code == 130
    assert done.stderr.rstrip().endswith("interrupted before the run began: nothing is kept")
