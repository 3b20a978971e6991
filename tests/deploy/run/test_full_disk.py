"""A run whose disk is full at its last checkpoint: status, last line and summary say so."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tests.deploy.preflight.preflight_support import small_disk

pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.deep]


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
