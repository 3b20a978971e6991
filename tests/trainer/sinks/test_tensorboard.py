"""What TensorBoard's own reader finds in the files."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

from penstock.trainer.sinks import SINKS, SinkJob, numbers

pytestmark = pytest.mark.torch


@pytest.fixture
def found(run_dir, line, record):
    sink = SINKS.get("tensorboard")(SinkJob(run_dir))
    sink.rewind(0)
    sink.trajectories(0, [record])
    sink.step(1, line)
    sink.step(2, {**line, "reward": 0.75})
    sink.evaluation(1, {"eval/reward": 0.5})
    sink.close()
    made = accumulator.EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"tensors": 0, "scalars": 0})
    made.Reload()
    return made


def test_every_number_is_there_by_version(found, line) -> None:
    assert set(found.Tags()["scalars"]) == {*numbers(line), "eval/reward"}
    assert [(event.step, event.value) for event in found.Scalars("reward")] == [(1, 0.25), (2, 0.75)]
    assert [(event.step, event.value) for event in found.Scalars("staleness_tokens/1")] == [(1, 12.0), (2, 12.0)]
    assert [(event.step, event.value) for event in found.Scalars("eval/reward")] == [(1, 0.5)]


def test_texts_are_shown_letter_for_letter(found) -> None:
    (event,) = found.Tensors("episode/0/text_summary")
    assert event.step == 1
    text = event.tensor_proto.string_val[0].decode()
    assert all(row.startswith("    ") for row in text.splitlines()), "TensorBoard would render it as Markdown"
    rows = [row[4:] for row in text.splitlines()]
    assert rows[:2] == ["train/0#0  reward 1.0  completed", "── prompt"]
    assert "── sampled, version 3" in rows
    assert "# <script>alert(1)</script>" in rows
    from tensorboard import plugin_util

    html = plugin_util.markdown_to_safe_html(text)
    assert "<script>" not in html
    assert "<strong>" not in html
