"""A run whose disk is full, at its last checkpoint or at its end: status, last line and summary say so."""

from __future__ import annotations

import errno
import signal
import sys
from pathlib import Path

import pytest
from tests.deploy.conftest import RECIPE
from tests.deploy.preflight.preflight_support import small_disk
from typer.testing import CliRunner

from penstock.deploy import RoleFailed, RoleProcess, RoleSpec, RunConnection, RunDir, app, load_config
from penstock.deploy.run.launcher import _run_roles
from penstock.deploy.run.plan import Role
from penstock.deploy.run.supervisor import LocalPlacement
from penstock.testing import MemoryTransferQueue

pytest.importorskip("torch")
pytestmark = [pytest.mark.torch]


class FailingRoles(LocalPlacement):
    """Every role fails for good at once."""

    def place(self, role: Role, run: RunDir) -> RoleProcess:
        argv = [sys.executable, "-c", "raise SystemExit('no such model')"]
        return RoleProcess(RoleSpec(role.name, argv, {}, run.root.parent / f"{role.name}.log", 0))


async def test_a_failed_run_whose_records_cannot_be_written_names_the_failure(tmp_path: Path) -> None:
    config = load_config(RECIPE, [f"runs_dir={tmp_path}", "name=mine", "telemetry.metrics=false"])
    run, link = RunDir.of(config), RunConnection("", "mine", None, "a token")  # no folder: every write fails
    with pytest.raises(RoleFailed, match="no such model"):
        await _run_roles(config, run, link, MemoryTransferQueue(), FailingRoles(), keepers=[], summary="")
    assert not run.root.exists()


def test_a_full_disk_is_named_without_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "lives.json")

    monkeypatch.setattr("penstock.deploy.run.launcher.launch", full)
    done = CliRunner().invoke(app, ["run", str(RECIPE), f"runs_dir={tmp_path}", "name=full"])
    assert done.exit_code == 1
    assert "No space left on device: 'lives.json'" in done.stderr


@pytest.mark.slow
@pytest.mark.deep
def test_ctrl_c_with_a_full_disk_is_not_an_orderly_stop(start_run, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    with small_disk(tmp_path / "full" / "checkpoints", 1) as disk:
        (disk / "of-others").write_bytes(bytes(1 << 19))
        run = start_run(
            "full", "trainer.steps=100000", "trainer.checkpoint_every=100000", "data.eval=null", resume=True
        )
        run.wait_for(lambda: run.steps() >= 1)
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(120) == 1, run.tail()
        assert [path.name for path in disk.iterdir()] == ["of-others"]
        for text in (run.log.read_text().splitlines()[-1], run.summary()["ended"]):
            assert "No space left on device" in text
            assert str(disk) in text
