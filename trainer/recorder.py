"""What a run leaves for people and programs: steps, evaluations, why it ended; numbers and texts to its sinks."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.trainer.batch import StepBatch
from penstock.trainer.jsonl import append_line, read_lines, rewrite_lines
from penstock.trainer.readable import readable_trajectory
from penstock.trainer.sinks import MetricSink
from penstock.trainer.sinks.jsonl import JsonLines
from penstock.trainer.stopping import Stopping

logger = logging.getLogger(__name__)


class Recorder:
    """Only rank 0 records, one call at a time: a line appended while the file is rewritten would be lost.

    Lines are flushed as they are written; a rewritten file is replaced atomically.
    """

    def __init__(
        self,
        run_dir: Path,
        model: str,
        save_trajectories: int,
        stopping: Stopping,
        further: Sequence[MetricSink] = (),
    ) -> None:
        """`further`: sinks besides ``metrics.jsonl``; none of their calls may raise."""
        self._steps = run_dir / "steps.jsonl"
        self._evaluations = run_dir / "eval.jsonl"
        self._ended = run_dir / "ended.json"
        self._save_trajectories = save_trajectories
        self._stopping = stopping
        self._one_at_a_time = threading.Lock()
        self._lines = JsonLines(run_dir)
        self._sinks: Sequence[MetricSink] = (self._lines, *further)
        self._tokenizer = _tokenizer(model)

    def rewind(self, step: int) -> None:
        """Forget `step` and later: they are trained again. A line that a crash cut short goes too."""
        rewrite_lines(self._steps, (line for line in read_lines(self._steps) if line["step"] < step))
        rewrite_lines(self._evaluations, (line for line in read_lines(self._evaluations) if line["version"] <= step))
        for sink in self._sinks:
            sink.rewind(step)
        self._ended.unlink(missing_ok=True)
        self._stopping.begin(self._lines.lines())

    def step(self, batch: StepBatch, metrics: Mapping[str, Any], advantages: Tensor) -> None:
        """Everything of one step. The step's episodes are written first: the account is never behind the metrics."""
        episodes = [episode for group in batch.groups for episode in group]
        records = self._readable(batch, advantages)
        with self._one_at_a_time:
            append_line(self._steps, {"step": batch.step, "version": batch.step + 1, "episodes": episodes})
            for sink in self._sinks:
                sink.trajectories(batch.step, records)
                sink.step(batch.step + 1, metrics)
        self._stopping.see(batch.step + 1, metrics)
        self._stopping.check(metrics)

    def evaluation(self, version: int, result: Mapping[str, float], wall_s: float) -> None:
        """A line of ``eval.jsonl``; its numbers also join the line of the step that made the version."""
        named = {f"eval/{name}": value for name, value in result.items()}
        with self._one_at_a_time:
            append_line(self._evaluations, {"version": version, **result, "wall_s": wall_s})
            for sink in self._sinks:
                sink.evaluation(version, named)
        self._stopping.see(version, named)

    def ended(self, version: int, why: str) -> None:
        """``ended.json``: the run is over, and why. Gone where it goes on after all."""
        logger.info("the run is over at version %d: %s", version, why)
        self._ended.write_text(json.dumps({"version": version, "why": why}) + "\n")

    def why_over(self) -> str | None:
        """See `Stopping.why`."""
        return self._stopping.why()

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

    def _readable(self, batch: StepBatch, advantages: Tensor) -> list[dict[str, Any]]:
        chosen = zip(batch.trajectories, advantages.tolist(), strict=True)
        return [readable_trajectory(t, a, self._tokenizer) for t, a in list(chosen)[: self._save_trajectories]]


def _tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        logger.warning("trajectories are written as token ids: %s has no tokenizer (%s)", model, error)
        return None
