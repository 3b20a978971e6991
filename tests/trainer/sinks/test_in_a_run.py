"""A real training loop with sinks beside it: one that breaks changes nothing, and times are left for a picture."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

pytest.importorskip("torch")

from trainer_support import make_job, write_rows

from penstock.common import read_jsonl
from penstock.trainer import TrainerMetrics, train

pytestmark = pytest.mark.torch
BREAKING = "tests.trainer.sinks.breaking:breaking"


async def test_a_sink_that_breaks_changes_nothing_of_a_run(tmp_path: Path, tiny_model: str, caplog) -> None:
    watcher = TrainerMetrics()
    settings = {"steps": 2, "sinks": ("tensorboard", BREAKING), "eval_every": 2}
    evals = write_rows(tmp_path / "eval.jsonl", 3)
    job = make_job(tmp_path, tiny_model, settings, watchers=(watcher,), data={"eval": evals})
    with caplog.at_level(logging.WARNING, "penstock"):
        await train(job)
    assert [row["step"] for row in read_jsonl(job.run_dir / "metrics.jsonl")] == [0, 1]
    assert (job.run_dir / "told.txt").read_text() == "from 0\nversion 1\n"
    told = [message for message in caplog.messages if "trainer.sinks" in message]
    assert len(told) == 1
    assert "the server went away" in told[0]
    assert list((job.run_dir / "tensorboard").iterdir())
    value = watcher.registry.get_sample_value
    assert value("penstock_trainer_policy_version") == 2
    assert value("penstock_trainer_metric", {"name": "eval/episodes"}) == 3


async def test_times_of_every_phase_are_left(tmp_path: Path, tiny_model: str) -> None:
    job = make_job(tmp_path, tiny_model, {"steps": 2, "checkpoint_every": 1})
    await train(job)
    lines = read_jsonl(job.run_dir / "timeline.jsonl", broken="skip")
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
