from pathlib import Path

import pytest

from penstock.deploy import ConfigError, RunDir, RunLock


def test_run_lock_refuses_a_second_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "mine")
    with (
        RunLock(run, resume=False),
        pytest.raises(ConfigError, match="'mine' is running"),
        RunLock(run, resume=True),
    ):
        raise AssertionError("the second run got the lock")


def test_an_earlier_run_is_kept_unless_resumed(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "mine")
    with RunLock(run, resume=False):
        (run.root / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match="--resume"), RunLock(run, resume=False):
        raise AssertionError("an earlier run was overwritten")
    with RunLock(run, resume=True):
        assert run.summary.exists()
