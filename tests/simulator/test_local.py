"""Reading a run's files into a record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.simulator.local import recorded
from penstock.simulator.measured import SKIPPED


def run_dir(root: Path, name: str, staleness: int, wall_s: float) -> str:
    folder = root / name
    folder.mkdir()
    (folder / "config.yaml").write_text(
        f"name: {name}\nmax_staleness: {staleness}\ngroup_size: 8\ngroups_per_step: 8\n"
        "agent: {workers: 2, concurrency: 32}\n"
    )
    row = {"train_s": 1.0, "publish_s": 0.01, "episode/llm_latency_s": 0.2, "episode/tool/python_s": 0.05}
    row |= {"num_turns_mean": 1.5, "sampled_length_mean": 20.0, "response_length_mean": 30.0}
    row |= {"tokens": 64 * 55, "episodes": 64}
    walls = [99.0] * SKIPPED + [wall_s - 1, wall_s + 1]
    (folder / "metrics.jsonl").write_text("".join(json.dumps({**row, "wall_s": wall}) + "\n" for wall in walls))
    return f"{folder}:2.5"


def test_a_pair_is_recorded_from_the_counted_steps(tmp_path: Path) -> None:
    found = recorded([run_dir(tmp_path, "a", 2, 3.0), run_dir(tmp_path, "b", 0, 4.0)], "two cores", "nobody")
    first, second = found.runs
    assert (found.pairs[0].calibrated_on, found.pairs[0].predicted) == ("a", "b")
    assert (first.wall_s, second.wall_s, first.steps, first.load) == (3.0, 4.0, 2, 2.5)
    assert first.prompt_tokens == pytest.approx(55 - 30)
    assert first.observation_tokens == pytest.approx(10 / 0.5)


def test_one_run_is_no_pair(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give pairs of RUN_DIR:LOAD"):
        recorded([run_dir(tmp_path, "a", 2, 3.0)], "", "")
