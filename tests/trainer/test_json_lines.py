"""``metrics.jsonl`` and ``trajectories/`` of long runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.common import read_jsonl
from penstock.trainer.sinks import jsonl
from penstock.trainer.sinks.jsonl import JsonLines


@pytest.mark.parametrize("version", [1, 2, 700, 999, 1000, 1001, 2000])
@pytest.mark.parametrize("block", [16, 1 << 16])
def test_an_evaluation_writes_its_line_and_those_after_it(
    version: int, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "BLOCK", block)
    sink, file = JsonLines(tmp_path), tmp_path / "metrics.jsonl"
    steps = [step for step in range(1000) if step != 500]  # a step that was given up has no line
    for step in steps:
        sink.step(step + 1, {"step": step, "version": step + 1, "loss": 0.1 * step})
    inode, before = file.stat().st_ino, read_jsonl(file)
    sink.evaluation(version, {"eval/reward": 0.5})
    assert file.stat().st_ino == inode, "the file is replaced as a whole"
    assert read_jsonl(file) == [{**line, "eval/reward": 0.5} if line["version"] == version else line for line in before]


def test_an_evaluation_of_the_model_itself_has_no_line(tmp_path: Path) -> None:
    JsonLines(tmp_path).evaluation(0, {"eval/reward": 0.5})
    assert not (tmp_path / "metrics.jsonl").exists()


def test_recorded_trajectories_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MOST_BYTES", 1000)
    sink = JsonLines(tmp_path)
    for step in range(151):
        sink.trajectories(step, [{"text": "x" * 80}])
    names = sorted(path.name for path in (tmp_path / "trajectories").iterdir())
    assert names[-1] == "step_000150.jsonl"
    assert len(names) < 15
