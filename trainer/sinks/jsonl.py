"""``metrics.jsonl`` and ``trajectories/``: what a run's own summary, page and resumption read. Always there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from penstock.common import append_jsonl, iter_jsonl, rewrite_jsonl
from penstock.trainer.sinks import SINKS, MetricSink, Record, SinkJob

BLOCK = 1 << 16
MOST_BYTES = 4 << 30


class JsonLines:
    """Writes one line per step. `rewind` cuts the file back, also a line that a crash left incomplete."""

    def __init__(self, run_dir: Path) -> None:
        self._metrics = run_dir / "metrics.jsonl"
        self._trajectories = run_dir / "trajectories"
        self._trajectories.mkdir(parents=True, exist_ok=True)

    def rewind(self, step: int) -> None:
        rewrite_jsonl(self._metrics, (line for line in self.lines() if line["step"] < step))

    def step(self, version: int, metrics: Mapping[str, Any]) -> None:
        append_jsonl(self._metrics, [metrics])

    def evaluation(self, version: int, values: Mapping[str, float]) -> None:
        """Joins the line of the step that made the version. Only that line and those after it are written, at once."""
        if not self._metrics.exists():
            return
        with self._metrics.open("rb+", buffering=0) as file:
            if (place := _line_of(file, version)) is not None:
                offset, line, after = place
                joined = json.dumps({**json.loads(line), **values}).encode() + b"\n"
                os.pwrite(file.fileno(), joined + after, offset)

    def trajectories(self, step: int, records: Sequence[Record]) -> None:
        """The oldest files go where all together have more than `MOST_BYTES`."""
        if not records:
            return
        rewrite_jsonl(self._trajectories / f"step_{step:06d}.jsonl", records)
        if step % 50 == 0:  # the size of all recorded trajectories is looked at now and then
            total = 0
            for path in sorted(self._trajectories.glob("step_*.jsonl"), reverse=True):
                total += path.stat().st_size
                if total > MOST_BYTES:
                    path.unlink()

    def close(self) -> None:
        """Every line was flushed as it was written."""

    def lines(self) -> Iterator[dict[str, Any]]:
        """One in memory at a time: there are as many as steps."""
        return iter_jsonl(self._metrics)


def _line_of(file: FileIO, version: int) -> tuple[int, bytes, bytes] | None:
    """(offset, line of `version`, the lines after it), read from the end; None where the step has no line."""
    size, block = os.fstat(file.fileno()).st_size, BLOCK
    while True:
        start = max(0, size - block)
        lines = os.pread(file.fileno(), size - start, start).splitlines(keepends=True)
        if start:  # inside a line
            start += len(lines.pop(0))
        for place in range(len(lines) - 1, -1, -1):
            newest = json.loads(lines[place])["version"]
            if newest == version:
                return start + sum(map(len, lines[:place])), lines[place], b"".join(lines[place + 1 :])
            if newest < version:
                return None
        if size <= block:
            return None
        block *= 2


@SINKS.register("jsonl")
def jsonl(job: SinkJob) -> MetricSink:
    return JsonLines(job.run_dir)
