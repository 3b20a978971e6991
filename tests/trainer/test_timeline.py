"""Intervals as they happened, over crashes too."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from trainer_support import make_job

from penstock.common import read_jsonl
from penstock.trainer import TIMELINE_FILE, Track, train
from penstock.trainer.timeline import Timeline

pytestmark = pytest.mark.torch


def test_intervals_are_written_in_the_order_of_their_ends(tmp_path) -> None:
    timeline, before = Timeline(tmp_path), time.time()
    with timeline.during(Track.PUBLISH, "publish", 1), timeline.during(Track.STEPS, "wait", 0):
        time.sleep(0.01)
    with pytest.raises(KeyError), timeline.during(Track.STEPS, "update", 0):
        raise KeyError
    assert not (tmp_path / TIMELINE_FILE).exists()
    timeline.write()
    lines = read_jsonl(tmp_path / TIMELINE_FILE, broken="skip")
    assert [(line["track"], line["name"], line["number"]) for line in lines] == [
        *((Track.STEPS, "wait", 0), (Track.PUBLISH, "publish", 1), (Track.STEPS, "update", 0))
    ]
    assert before <= lines[1]["at_unix_s"] <= lines[0]["at_unix_s"] <= time.time()
    assert lines[1]["s"] >= lines[0]["s"] >= 0.01


def test_a_later_life_appends_and_a_half_written_line_costs_itself_alone(tmp_path) -> None:
    for life in range(2):
        timeline = Timeline(tmp_path)
        with timeline.during(Track.STEPS, "wait", life):
            pass
        timeline.write()
        with (tmp_path / TIMELINE_FILE).open("a") as file:
            file.write('{"track": "steps", "na')
    assert [line["number"] for line in read_jsonl(tmp_path / TIMELINE_FILE, broken="skip")] == [0, 1]


def test_other_ranks_write_nothing(tmp_path) -> None:
    timeline = Timeline()
    with timeline.during(Track.STEPS, "wait", 0):
        pass
    timeline.write()
    assert list(tmp_path.iterdir()) == []


async def test_times_of_every_phase_are_left(tmp_path: Path, tiny_model: str) -> None:
    job = make_job(tmp_path, tiny_model, {"steps": 2, "checkpoint_every": 1})
    await train(job)
    lines = read_jsonl(job.run_dir / TIMELINE_FILE, broken="skip")
    of_steps = [(line["name"], line["number"]) for line in lines if line["track"] == "steps"]
    phases = ["wait", "score", "advantages", "update", "announce", "record", "save"]
    assert of_steps[:14] == [(name, step) for step in (0, 1) for name in phases]
    assert [line["number"] for line in lines if line["track"] == "publish"] == [1, 2]
    assert {line["number"] for line in lines if line["track"] == "checkpoint"} == {1, 2}
    starts = [line["at_unix_s"] for line in lines if line["track"] == "steps"]
    assert starts == sorted(starts)
    row = read_jsonl(job.run_dir / "metrics.jsonl")[1]
    spent = sum(line["s"] for line in lines if line["track"] == "steps" and line["number"] == 1)
    assert spent <= row["wall_s"] + sum(line["s"] for line in lines if line["name"] in ("record", "save"))
