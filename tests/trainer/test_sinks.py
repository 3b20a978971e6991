"""Where numbers go: a sink beside the run, TensorBoard and W&B as their own readers see them, Prometheus."""

from __future__ import annotations

import json
import logging
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY, MagicMock, call

import pytest

pytest.importorskip("torch")

from trainer_support import make_job, write_rows

from penstock.common import UnknownName, read_jsonl
from penstock.trainer import TrainerConfig, TrainerMetrics, train
from penstock.trainer.sinks import SINKS, SinkJob, numbers
from penstock.trainer.sinks.async_sink import AsyncSink
from penstock.trainer.sinks.wandb import resume_id, without_secrets

pytestmark = pytest.mark.torch
LINE: dict[str, Any] = {
    "step": 0,
    "version": 1,
    "reward": 0.25,
    "grad_norm": 1.5,
    "staleness_max": 1,
    "staleness_tokens": {"0": 30, "1": 12},
    "outcome/completed": 4,
    "episode/tool_calls": 1.5,
}
"""As the trainer writes it, with a histogram and names of every kind."""
RECORD: dict[str, Any] = {
    "episode_id": "train/0#0",
    "reward": 1.0,
    "outcome": {"kind": "completed", "reason": "", "component": ""},
    "segments": [
        {
            "prompt": "What is 1 + 1?",
            "prompt_tokens": 5,
            "runs": [
                {"mask": 1, "tokens": 3, "text": "# <script>alert(1)</script>\n**bold**", "versions": [[3, 3]]},
                {"mask": 0, "tokens": 2, "text": "the tool's answer"},
            ],
        }
    ],
}
"""An episode whose model writes Markdown and HTML."""


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder. Sinks get 200 s to start and to close: their libraries are slow on a busy machine."""
    monkeypatch.setattr("penstock.trainer.sinks.async_sink.CLOSE_S", 200.0)
    monkeypatch.setattr("penstock.trainer.sinks.wandb.START_TIMEOUT_S", 200.0)
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "200")
    folder = tmp_path / "calculator-7"
    folder.mkdir()
    return folder


def write_two_steps(sink: Any) -> None:
    sink.rewind(0)
    sink.trajectories(0, [RECORD])
    sink.step(1, LINE)
    sink.step(2, {**LINE, "reward": 0.75})
    sink.evaluation(1, {"eval/reward": 0.5})
    sink.close()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Of the sinks."""
    return [record.message for record in caplog.records if "trainer.sinks" in record.message]


# beside a run --------------------------------------------------------------------------------------------------------
def run_beside(tmp_path: Path, inner: MagicMock, versions: int = 2) -> AsyncSink:
    sink = AsyncSink("mine", lambda job: inner, SinkJob(tmp_path))
    sink.rewind(0)
    for version in range(1, versions + 1):
        sink.step(version, {"reward": 0.5})
        sink.trajectories(version - 1, [{}])
    sink.evaluation(versions, {"eval/reward": 1.0})
    sink.close()
    return sink


def test_a_sink_hears_everything_in_order(tmp_path: Path) -> None:
    inner = MagicMock()
    run_beside(tmp_path, inner)
    steps = [call.step(1, {"reward": 0.5}), call.trajectories(0, [{}]), call.step(2, ANY), call.trajectories(1, [{}])]
    assert inner.mock_calls == [call.rewind(0), *steps, call.evaluation(2, {"eval/reward": 1.0}), call.close()]


def test_a_failure_is_logged_once_and_ends_the_sink_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    inner = MagicMock()
    inner.step.side_effect = ConnectionError("the server is away")
    run_beside(tmp_path, inner).step(9, {})
    assert inner.mock_calls == [call.rewind(0), call.step(1, ANY)]
    (message,) = warnings(caplog)
    assert "mine failed and is left out" in message
    assert "the server is away" in message


def test_a_sink_that_cannot_be_made_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = AsyncSink("mine", MagicMock(side_effect=ImportError("No module named 'mine'")), SinkJob(tmp_path))
    sink.rewind(0)
    sink.close()
    (message,) = warnings(caplog)
    assert "No module named 'mine'" in message


def test_a_sink_that_hangs_holds_nobody_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.trainer.sinks.async_sink.MOST_WAITING", 4)
    monkeypatch.setattr("penstock.trainer.sinks.async_sink.CLOSE_S", 0.2)
    released, inner = threading.Event(), MagicMock()
    inner.step.side_effect = lambda *_: released.wait(60)
    run_beside(tmp_path, inner, versions=50)
    released.set()
    assert sum("does not keep up" in message for message in warnings(caplog)) == 1
    assert sum("was not done within" in message for message in warnings(caplog)) == 1


async def test_a_sink_that_breaks_changes_nothing_of_a_run(
    tmp_path: Path, tiny_model: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, watcher = MagicMock(), TrainerMetrics()
    inner.step.side_effect = ConnectionError("the server went away")
    monkeypatch.setitem(SINKS._entries, "breaking", lambda job: inner)
    settings = {"steps": 2, "sinks": ("tensorboard", "breaking"), "eval_every": 2}
    evals = write_rows(tmp_path / "eval.jsonl", 3)
    job = make_job(tmp_path, tiny_model, settings, watchers=(watcher,), data={"eval": evals})
    with caplog.at_level(logging.WARNING, "penstock"):
        await train(job)
    assert [row["step"] for row in read_jsonl(job.run_dir / "metrics.jsonl")] == [0, 1]
    assert inner.mock_calls == [call.rewind(0), call.trajectories(0, ANY), call.step(1, ANY)]
    (message,) = warnings(caplog)
    assert "the server went away" in message
    assert list((job.run_dir / "tensorboard").iterdir())
    value = watcher.registry.get_sample_value
    assert value("penstock_trainer_policy_version") == 2
    assert value("penstock_trainer_metric", {"name": "eval/episodes"}) == 3


def test_names_are_found_and_a_new_sink_is_one_function() -> None:
    assert SINKS.names() == ["jsonl", "tensorboard", "wandb"]
    assert SINKS.get("penstock.trainer.sinks.jsonl:jsonl") is SINKS.get("jsonl")
    with pytest.raises(UnknownName, match="did you mean 'wandb'"):
        SINKS.get("wandbb")


def test_every_number_of_a_line_and_nothing_else() -> None:
    line = {"step": 3, "reward": 0.25, "staleness_tokens": {"0": 10, "1": 4}, "note": "text", "rows": [1]}
    assert numbers(line) == {"step": 3, "reward": 0.25, "staleness_tokens/0": 10, "staleness_tokens/1": 4}


# Prometheus ----------------------------------------------------------------------------------------------------------
def test_newest_numbers_and_sums_over_steps() -> None:
    metrics = TrainerMetrics()
    metrics.rewind(4)
    value = metrics.registry.get_sample_value
    assert value("penstock_trainer_policy_version") == 4
    times = {"wall_s": 2.0, "wait_s": 0.5, "train_s": 1.5}
    metrics.step(5, {"step": 4, "reward": 0.25, "tokens": 100, "episodes": 8, "staleness_tokens": {"1": 7}, **times})
    metrics.step(6, {"step": 5, "reward": 0.75, "tokens": 50, "episodes": 8, **times})
    metrics.evaluation(5, {"eval/reward": 0.5})
    assert value("penstock_trainer_policy_version") == 6
    assert value("penstock_trainer_steps_total") == 2
    assert value("penstock_trainer_tokens_total") == 150
    assert value("penstock_trainer_episodes_total") == 16
    assert value("penstock_trainer_step_seconds_sum") == 4.0
    assert value("penstock_trainer_phase_seconds_total", {"phase": "wait"}) == 1.0
    assert value("penstock_trainer_metric", {"name": "reward"}) == 0.75
    assert value("penstock_trainer_metric", {"name": "staleness_tokens/1"}) == 7
    assert value("penstock_trainer_metric", {"name": "eval/reward"}) == 0.5


# TensorBoard ---------------------------------------------------------------------------------------------------------
def test_tensorboard_has_every_number_by_version_and_texts_letter_for_letter(run_dir: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from tensorboard import plugin_util

    write_two_steps(SINKS.get("tensorboard")(SinkJob(run_dir)))
    found = accumulator.EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"tensors": 0, "scalars": 0})
    found.Reload()
    assert set(found.Tags()["scalars"]) == {*numbers(LINE), "eval/reward"}
    assert [(event.step, event.value) for event in found.Scalars("reward")] == [(1, 0.25), (2, 0.75)]
    assert [(event.step, event.value) for event in found.Scalars("staleness_tokens/1")] == [(1, 12.0), (2, 12.0)]
    assert [(event.step, event.value) for event in found.Scalars("eval/reward")] == [(1, 0.5)]
    (event,) = found.Tensors("episode/0/text_summary")
    assert event.step == 1
    text = event.tensor_proto.string_val[0].decode()
    assert all(row.startswith("    ") for row in text.splitlines()), "TensorBoard would render it as Markdown"
    rows = [row[4:] for row in text.splitlines()]
    assert rows[:2] == ["train/0#0  reward 1.0  completed", "── prompt"]
    assert "── sampled, version 3" in rows
    assert "# <script>alert(1)</script>" in rows
    html = plugin_util.markdown_to_safe_html(text)
    assert "<script>" not in html
    assert "<strong>" not in html


# W&B -----------------------------------------------------------------------------------------------------------------
SETTINGS = {
    "name": "calculator-7",
    "seed": 3,
    "transfer_queue": {"url": "redis://user:hidden@host:6379", "deadline_s": 9.0},
    "tools": [{"name": "search", "settings": {"api_key": "hidden", "top": 3}}],
    "trainer": TrainerConfig(wandb={"project": "sums", "group": "ablation", "samples": 1}).model_dump(mode="json"),
}
BLOCK, HEADER = 32 << 10, 7
FULL, LAST = 1, 4


def messages_in(data: bytes) -> Iterator[bytes]:
    """W&B's file is LevelDB's log format: pieces of messages in blocks, each after (checksum, length, kind)."""
    assert data.startswith(b":W&B")
    message, at = b"", HEADER
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:  # too little room for a piece: the block's rest is padding
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        message += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (FULL, LAST):
            yield message
            message = b""


def records_of(run_dir: Path) -> list[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = (run_dir / "wandb").glob("offline-run-*/*.wandb")
    return [Record.FromString(message) for message in messages_in(path.read_bytes())]


def history_of(records: list[Any]) -> list[dict[str, Any]]:
    def name(item: Any) -> str:
        return item.key or "/".join(item.nested_key)

    rows = [record.history.item for record in records if record.HasField("history")]
    return [{name(item): json.loads(item.value_json) for item in row} for row in rows]


def test_an_offline_run_holds_the_numbers_the_settings_and_no_secret(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    write_two_steps(AsyncSink("wandb", SINKS.get("wandb"), SinkJob(run_dir, SETTINGS)))
    records = records_of(run_dir)
    (run,) = [one.run for one in records if one.HasField("run")][:1]
    assert (run.project, run.run_group, run.display_name) == ("sums", "ablation", "calculator-7")
    assert run.run_id == resume_id(run_dir) == (run_dir / "wandb_id").read_text().strip()
    config = {update.key: update.value_json for update in run.config.update}
    assert json.loads(config["seed"]) == 3
    assert json.loads(config["tools"]) == [{"name": "search", "settings": {"top": 3}}]
    assert b"hidden" not in b"".join(one.SerializeToString() for one in records)
    rows = history_of(records)
    assert [(row["version"], row.get("reward"), row.get("eval/reward")) for row in rows] == [
        *((1, 0.25, None), (2, 0.75, None), (1, None, 0.5))
    ]
    assert rows[0]["staleness_tokens/1"] == 12
    assert rows[0]["episodes/_type"] == "table-file"
    (table,) = (run_dir / "wandb").glob("offline-run-*/files/media/table/*.table.json")
    assert "alert(1)" in json.loads(table.read_text())["data"][0][2]


def test_a_resumed_run_keeps_its_id(tmp_path: Path) -> None:
    first = resume_id(tmp_path)
    assert len(first) == 16
    assert resume_id(tmp_path) == first


def test_without_a_key_the_run_goes_on_and_one_warning_is_logged(
    run_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    write_two_steps(AsyncSink("wandb", SINKS.get("wandb"), SinkJob(run_dir, {})))
    (message,) = warnings(caplog)
    assert "wandb failed and is left out" in message
    assert "WANDB_API_KEY is not set" in message


def test_what_may_be_a_secret_is_not_in_the_settings() -> None:
    assert without_secrets({"a": {"hf_token": "x", "tokens": 5, "list": [{"password": "y", "b": 1}]}}) == {
        "a": {"tokens": 5, "list": [{"b": 1}]}
    }
