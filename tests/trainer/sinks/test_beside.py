"""A sink beside the run: whatever it does, its caller goes on."""

from __future__ import annotations

import logging
import threading

import pytest

from penstock.common import UnknownName
from penstock.trainer.sinks import SINKS, SinkJob, numbers
from penstock.trainer.sinks.async_sink import AsyncSink


class Noting:
    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def rewind(self, step):
        self.calls.append(("rewind", step))

    def step(self, version, metrics):
        self.calls.append(("step", version, dict(metrics)))

    def evaluation(self, version, values):
        self.calls.append(("evaluation", version, dict(values)))

    def trajectories(self, step, records):
        self.calls.append(("trajectories", step, len(records)))

    def close(self):
        self.calls.append(("close",))


class Failing(Noting):
    def step(self, version, metrics):
        super().step(version, metrics)
        raise ConnectionError("the server is away")


def tell(sink: AsyncSink, versions: int = 3) -> None:
    sink.rewind(0)
    for version in range(1, versions + 1):
        sink.trajectories(version - 1, [{}])
        sink.step(version, {"reward": 0.5})
    sink.evaluation(versions, {"eval/reward": 1.0})


def test_a_sink_hears_everything_in_order(tmp_path) -> None:
    inner = Noting()
    sink = AsyncSink("noting", lambda job: inner, SinkJob(tmp_path))
    tell(sink, versions=2)
    sink.close()
    assert [call[0] for call in inner.calls] == [
        *("rewind", "trajectories", "step", "trajectories", "step", "evaluation", "close")
    ]
    assert inner.calls[2] == ("step", 1, {"reward": 0.5})


def test_a_failure_is_told_once_and_ends_the_sink_alone(tmp_path, caplog) -> None:
    inner = Failing()
    with caplog.at_level(logging.WARNING):
        sink = AsyncSink("failing", lambda job: inner, SinkJob(tmp_path))
        tell(sink)
        sink.close()
        sink.step(9, {})
    assert [call[0] for call in inner.calls] == ["rewind", "trajectories", "step"]
    (told,) = caplog.messages
    assert "failing failed and is left out" in told
    assert "the server is away" in told


def test_one_that_cannot_be_made_is_told_once(tmp_path, caplog) -> None:
    def absent(job):
        raise ImportError("No module named 'wandb'")

    with caplog.at_level(logging.WARNING):
        sink = AsyncSink("wandb", absent, SinkJob(tmp_path))
        tell(sink)
        sink.close()
    assert ["No module named 'wandb'" in message for message in caplog.messages] == [True]


def test_one_that_hangs_holds_nobody_up(tmp_path, caplog, monkeypatch) -> None:
    monkeypatch.setattr("penstock.trainer.sinks.async_sink.MOST_WAITING", 4)
    monkeypatch.setattr("penstock.trainer.sinks.async_sink.CLOSE_S", 0.2)
    released = threading.Event()

    class Hanging(Noting):
        def step(self, version, metrics):
            released.wait(60)

    with caplog.at_level(logging.WARNING):
        sink = AsyncSink("hanging", lambda job: Hanging(), SinkJob(tmp_path))
        tell(sink, versions=50)
        sink.close()
    released.set()
    assert sum("does not keep up" in message for message in caplog.messages) == 1
    assert sum("was not done within" in message for message in caplog.messages) == 1


def test_names_are_found_and_a_new_sink_is_one_function() -> None:
    assert SINKS.names() == ["jsonl", "tensorboard", "wandb"]
    assert SINKS.get("penstock.trainer.sinks.jsonl:jsonl") is SINKS.get("jsonl")
    with pytest.raises(UnknownName, match="did you mean 'wandb'"):
        SINKS.get("wandbb")


def test_every_number_of_a_line_and_nothing_else() -> None:
    line = {"step": 3, "reward": 0.25, "staleness_tokens": {"0": 10, "1": 4}, "note": "text", "rows": [1]}
    assert numbers(line) == {"step": 3, "reward": 0.25, "staleness_tokens/0": 10, "staleness_tokens/1": 4}
