from pathlib import Path

import pytest

from penstock.common import process_identity
from penstock.deploy import ConfigError, RunDir, RunLock


def test_run_lock_refuses_a_second_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "mine")
    with (
        RunLock(run, resume=False),
        pytest.raises(ConfigError, match="'mine' is running"),
        RunLock(run, resume=True),
    ):
        raise AssertionError("the second run got the lock")


def test_run_dir_untrained_run_leaves_its_name_free(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "mine")
    with RunLock(run, resume=False):
        run.config.write_text("name: mine")
        run.redis.mkdir()
        (run.redis / "appendonly.aof").write_text("episodes of the first attempt")
        run.summary.write_text("{}")
        run.identity.write_text("a1b2\n")
        run.checkpoints.mkdir()
    with RunLock(run, resume=False):
        assert not run.summary.exists()
        assert not run.redis.exists()
        assert not run.identity.exists(), "it would let another recipe into the first one's queue"
        run.config.write_text("name: mine")
        run.metrics.write_text('{"step": 0}\n')
    with pytest.raises(ConfigError, match="--resume"), RunLock(run, resume=False):
        raise AssertionError("a run that trained was overwritten")


@pytest.mark.parametrize(
    "head",
    ["", f"# head: {process_identity()}", "# head: another-boot:1:2:3"],
    ids=["of an earlier release", "lives", "of another machine"],
)
def test_run_dir_untrained_run_that_may_live_keeps_its_name(tmp_path: Path, head: str) -> None:
    run = RunDir(tmp_path / "mine")
    run.root.mkdir()
    run.config.write_text("name: mine")
    run.connect_env.write_text(f"export PENSTOCK_RUN=mine\n{head}\n")
    with pytest.raises(ConfigError, match="--resume"), RunLock(run, resume=False):
        raise AssertionError("a run that may live on another machine was overwritten")


def test_an_earlier_run_is_kept_unless_resumed(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "mine")
    with RunLock(run, resume=False):
        (run.root / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match="--resume"), RunLock(run, resume=False):
        raise AssertionError("an earlier run was overwritten")
    with RunLock(run, resume=True):
        assert run.summary.exists()
