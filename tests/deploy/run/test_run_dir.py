"""The lock of a run's folder, and when its name is free again."""

import os
import time
from pathlib import Path

import pytest

from penstock.common import process_identity
from penstock.deploy import ConfigError, RunDir, RunLock


def refused(run: RunDir, message: str, *, resume: bool = False) -> None:
    with pytest.raises(ConfigError, match=message), RunLock(run, resume=resume):
        raise AssertionError("the run got the lock")


def test_run_lock_refuses_a_second_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "mine")
    with RunLock(run, resume=False):
        refused(run, "'mine' is running", resume=True)


def test_only_an_untrained_run_leaves_its_name_free(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "mine")
    with RunLock(run, resume=False):
        run.config.write_text("name: mine")
        run.redis.mkdir()
        (run.redis / "appendonly.aof").write_text("episodes of the first attempt")
        run.summary.write_text("{}")
        run.identity.write_text("a1b2\n")
        (run.checkpoints / "step_00000000").mkdir(parents=True)  # of a run that failed in its first step
        (run.checkpoints / "step_00000000" / "trainer.json").write_text("{}")
    with RunLock(run, resume=False):
        gone = (
            run.summary,
            run.redis,
            run.identity,
            run.checkpoints,
        )  # with its id another recipe would enter the first one's queue
        assert [path for path in gone if path.exists()] == []
        run.config.write_text("name: mine")
        run.metrics.write_text('{"step": 0}\n')
    refused(run, "--resume")
    with RunLock(run, resume=True):
        assert run.metrics.exists()
    run.metrics.unlink()
    (run.checkpoints / "step_00000001").mkdir(parents=True)
    (run.checkpoints / "step_00000001" / "trainer.json").write_text("{}")
    refused(run, "--resume")
    foreign = RunDir(tmp_path / "foreign")
    foreign.root.mkdir()
    (foreign.root / "summary.json").write_text("{}")
    refused(foreign, "--resume")


@pytest.mark.parametrize(
    "head",
    ["", f"# head: {process_identity()}", "# head: another-boot:1:2:3"],
    ids=["of an earlier release", "lives", "of another machine"],
)
def test_an_untrained_run_that_may_live_keeps_its_name(tmp_path: Path, head: str) -> None:
    run = RunDir(tmp_path / "mine")
    run.root.mkdir()
    run.config.write_text("name: mine")
    run.connect_env.write_text(f"export PENSTOCK_RUN=mine\n{head}\n")
    refused(run, "--resume")


def test_a_head_elsewhere_lives_while_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of this machine before a reboot: its run was alive for ever."""
    run = RunDir(tmp_path)
    run.connect_env.write_text("# head: another-boot:1:2:3\n")
    run.lives.write_text("{}")
    monkeypatch.setattr("penstock.deploy.run_dir.HEAD_SILENCE_S", 3600.0)  # longer than a slow machine takes here
    long_ago = time.time() - 7200
    for written, alive in ((run.lives, True), (run.connect_env, False)):
        os.utime(written, (long_ago, long_ago))
        assert run.is_alive() is alive
    run.connect_env.write_text(f"# head: {process_identity()}\n")
    os.utime(run.connect_env, (long_ago, long_ago))
    assert run.is_alive(), "a process of this machine lives though it is stopped"
