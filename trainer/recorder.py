"""What a run leaves for people and programs: metrics, steps, evaluations, readable trajectories, TensorBoard."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.trainer.batch import StepBatch
from penstock.trainer.jsonl import append_line, read_lines, rewrite_lines
from penstock.trainer.readable import readable_trajectory
from penstock.trainer.stopping import Stopping

logger = logging.getLogger(__name__)


class Recorder:
    """Only rank 0 records, one call at a time: a line appended while the file is rewritten would be lost.

    Lines are flushed as they are written; a rewritten file is replaced atomically.
    """

    def __init__(self, run_dir: Path, model: str, save_trajectories: int, stopping: Stopping) -> None:
        self._metrics = run_dir / "metrics.jsonl"
        self._steps = run_dir / "steps.jsonl"
        self._evaluations = run_dir / "eval.jsonl"
        self._trajectories = run_dir / "trajectories"
        self._ended = run_dir / "ended.json"
        self._save_trajectories = save_trajectories
        self._stopping = stopping
        self._one_at_a_time = threading.Lock()
        self._trajectories.mkdir(parents=True, exist_ok=True)
        self._tokenizer = _tokenizer(model)
        self._board = _tensorboard(run_dir / "tensorboard")

    def rewind(self, step: int) -> None:
        """Forget `step` and later: they are trained again. A line that a crash cut short goes too."""
        for path, last in ((self._metrics, step - 1), (self._steps, step - 1)):
            rewrite_lines(path, (line for line in read_lines(path) if line["step"] <= last))
        rewrite_lines(self._evaluations, (line for line in read_lines(self._evaluations) if line["version"] <= step))
        self._ended.unlink(missing_ok=True)
        self._stopping.begin(read_lines(self._metrics))

    def step(self, batch: StepBatch, metrics: Mapping[str, Any], advantages: Tensor) -> None:
        """Everything of one step. The step's episodes are written first: the account is never behind the metrics."""
        episodes = [episode for group in batch.groups for episode in group]
        with self._one_at_a_time:
            append_line(self._steps, {"step": batch.step, "version": batch.step + 1, "episodes": episodes})
            self._write_trajectories(batch, advantages)
            append_line(self._metrics, metrics)
            self._to_board(metrics, batch.step + 1)
        self._stopping.see(batch.step + 1, metrics)
        self._stopping.check(metrics)

    def evaluation(self, version: int, result: Mapping[str, float], wall_s: float) -> None:
        """A line of ``eval.jsonl``; its numbers also join the line of the step that made the version."""
        named = {f"eval/{name}": value for name, value in result.items()}
        with self._one_at_a_time:
            append_line(self._evaluations, {"version": version, **result, "wall_s": wall_s})
            lines = [{**line, **named} if line["version"] == version else line for line in read_lines(self._metrics)]
            rewrite_lines(self._metrics, lines)
            self._to_board(named, version)
        self._stopping.see(version, named)

    def ended(self, version: int, why: str) -> None:
        """``ended.json``: the run is over, and why. Gone where it goes on after all."""
        logger.info("the run is over at version %d: %s", version, why)
        self._ended.write_text(json.dumps({"version": version, "why": why}) + "\n")

    def why_over(self) -> str | None:
        """See `Stopping.why`."""
        return self._stopping.why()

    def close(self) -> None:
        if self._board is not None:
            self._board.close()

    def _write_trajectories(self, batch: StepBatch, advantages: Tensor) -> None:
        path = self._trajectories / f"step_{batch.step:06d}.jsonl"
        chosen = zip(batch.trajectories, advantages.tolist(), strict=True)
        lines = [readable_trajectory(t, a, self._tokenizer) for t, a in list(chosen)[: self._save_trajectories]]
        if lines:
            rewrite_lines(path, lines)

    def _to_board(self, metrics: Mapping[str, Any], version: int) -> None:
        if self._board is None:
            return
        for name, value in metrics.items():
            if isinstance(value, int | float):
                self._board.add_scalar(name, value, version)
        self._board.flush()


def _tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        logger.warning("trajectories are written as token ids: %s has no tokenizer (%s)", model, error)
        return None


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        logger.warning("no TensorBoard files: install penstock[train] for them")
        return None
    return SummaryWriter(str(folder))
