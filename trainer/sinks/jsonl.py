"""``metrics.jsonl`` and ``trajectories/``: what a run's own summary, page and resumption read. Always there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.common import append_jsonl, iter_jsonl, rewrite_jsonl
from penstock.trainer.sinks import SINKS, MetricSink, Record, SinkJob


class JsonLines:
    """One line per step; `rewind` cuts them back, and a line that a crash cut short goes too."""

    def __init__(self, run_dir: Path) -> None:
        self._metrics = run_dir / "metrics.jsonl"
        self._trajectories = run_dir / "trajectories"
        self._trajectories.mkdir(parents=True, exist_ok=True)

    def rewind(self, step: int) -> None:
        rewrite_jsonl(self._metrics, (line for line in self.lines() if line["step"] < step))

    def step(self, version: int, metrics: Mapping[str, Any]) -> None:
        append_jsonl(self._metrics, [metrics])

    def evaluation(self, version: int, values: Mapping[str, float]) -> None:
        """Joins the line of the step that made the version; the file is replaced at once."""
        lines = ({**line, **values} if line["version"] == version else line for line in self.lines())
        rewrite_jsonl(self._metrics, lines)

    def trajectories(self, step: int, records: Sequence[Record]) -> None:
        if records:
            rewrite_jsonl(self._trajectories / f"step_{step:06d}.jsonl", records)

    def close(self) -> None:
        """Every line was flushed as it was written."""

    def lines(self) -> Iterator[dict[str, Any]]:
        """One in memory at a time: there are as many as steps."""
        return iter_jsonl(self._metrics)


@SINKS.register("jsonl")
def jsonl(job: SinkJob) -> MetricSink:
    return JsonLines(job.run_dir)
