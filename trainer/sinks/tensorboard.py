"""TensorBoard files in the run's folder: every number of ``metrics.jsonl``, and a few episodes to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.trainer.sinks import SINKS, MetricSink, Record, SinkJob, numbers, plain_text


class Board:
    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def rewind(self, step: int) -> None:
        """Files are appended to: readers take the newest value of a version that comes twice."""

    def step(self, version: int, metrics: Mapping[str, Any]) -> None:
        for name, value in numbers(metrics).items():
            self._writer.add_scalar(name, value, version)
        self._writer.flush()

    def evaluation(self, version: int, values: Mapping[str, float]) -> None:
        self.step(version, values)

    def trajectories(self, step: int, records: Sequence[Record]) -> None:
        # The texts of two: event files are read from their beginning every time.
        for number, record in enumerate(records[:2]):
            self._writer.add_text(f"episode/{number}", as_code(plain_text(record)), step + 1)

    def close(self) -> None:
        self._writer.close()


def as_code(text: str) -> str:
    """Return Markdown that shows the text letter for letter: TensorBoard renders texts, and models write what they
    like.
    """
    return "\n".join(f"    {line}" for line in text.splitlines())


@SINKS.register("tensorboard")
def tensorboard(job: SinkJob) -> MetricSink:
    """Raises `ImportError` where TensorBoard is not installed."""
    from torch.utils.tensorboard import SummaryWriter

    return Board(SummaryWriter(str(job.run_dir / "tensorboard")))
