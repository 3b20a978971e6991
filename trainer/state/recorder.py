"""Records of a run for people and programs: steps, evaluations, the reason of its end; numbers and texts for its sinks.

A recorded trajectory has ids and text of each run of fed and of sampled tokens with versions and logprobs, and the
characters that each token made.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.common import append_jsonl, iter_jsonl, rewrite_jsonl
from penstock.trainer.data.images import FOLDER, UnreadableImages, keep_images
from penstock.trainer.sinks import MetricSink
from penstock.trainer.sinks.jsonl import JsonLines
from penstock.trainer.stopping import Stopping
from penstock.transfer_queue import Segment, Trajectory

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.trainer.batch import StepBatch

logger = logging.getLogger(__name__)


class Records:
    """Rank 0's numbers of a run: metrics.jsonl, eval.jsonl, ended.json, and its sinks. One call at a time: a line that
    is appended while the file is rewritten would be lost.

    Lines are flushed as they are written; a rewritten file is replaced atomically.
    """

    def __init__(self, run_dir: Path, stopping: Stopping, further: Sequence[MetricSink] = ()) -> None:
        """`further`: sinks besides ``metrics.jsonl``; none of their calls may raise."""
        self._evaluations, self._ended = run_dir / "eval.jsonl", run_dir / "ended.json"
        self._stopping = stopping
        self._one_at_a_time = threading.Lock()
        self._lines = JsonLines(run_dir)
        self._sinks: Sequence[MetricSink] = (self._lines, *further)

    def rewind(self, step: int) -> None:
        """Forget `step` and later: they are trained again. A line that a crash cut short goes too."""
        # Version 0 is measured again where nothing is trained.
        known = (line for line in iter_jsonl(self._evaluations) if step and line["version"] <= step)
        rewrite_jsonl(self._evaluations, known)
        for sink in self._sinks:
            sink.rewind(step)
        self._ended.unlink(missing_ok=True)
        self._stopping.begin(self._lines.lines())

    def metrics(self, version: int, metrics: Mapping[str, Any]) -> None:
        """The numbers of the step that made `version`."""
        for sink in self._sinks:
            sink.step(version, metrics)
        self._stopping.see(version, metrics)

    def evaluation(self, version: int, result: Mapping[str, float], wall_s: float) -> None:
        """A line of ``eval.jsonl``; its numbers also join the line of the step that made the version."""
        named = {f"eval/{name}": value for name, value in result.items()}
        with self._one_at_a_time:
            append_jsonl(self._evaluations, [{"version": version, **result, "wall_s": wall_s}])
            for sink in self._sinks:
                sink.evaluation(version, named)
        self._stopping.see(version, named)

    def ended(self, version: int, why: str) -> None:
        """``ended.json``: the run is over, and why. Removed if it continues after all."""
        logger.info("the run is over at version %d: %s", version, why)
        self._ended.write_text(json.dumps({"version": version, "why": why}) + "\n")

    def why_over(self) -> str | None:
        """Returns why the run is over before its last step; None if it continues."""
        return self._stopping.why()

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


class Recorder(Records):
    """Adds the account of episodes, ``steps.jsonl``, and some trajectories to read."""

    def __init__(
        self, run_dir: Path, model: str, save_trajectories: int, stopping: Stopping, further: Sequence[MetricSink] = ()
    ) -> None:
        super().__init__(run_dir, stopping, further)
        self._steps, self._images = run_dir / "steps.jsonl", run_dir / FOLDER
        self._save_trajectories = save_trajectories
        self._tokenizer = load_tokenizer(model)
        self._passed: set[int] = set()
        """Steps to come whose line is there already: they are passed without their episodes."""

    def rewind(self, step: int, updates_lost: Collection[int] = ()) -> None:
        """`updates_lost`: steps whose update the weights lack, or will lack when they are passed again. Their lines
        stay and say so, unless they had no episode left to learn from."""
        lost = dict[int, int]()
        self._passed = set()

        def known() -> Iterator[dict[str, Any]]:
            for line in iter_jsonl(self._steps):
                number, episodes = line["step"], len(line["episodes"])
                if number in updates_lost and episodes:
                    line["update_lost"] = True
                    lost[number] = episodes
                if number >= step and number in updates_lost:
                    self._passed.add(number)
                if number < step or number in updates_lost:
                    yield line

        rewrite_jsonl(self._steps, known())
        if lost:
            steps = ", ".join(map(str, lost))
            logger.error("the updates of steps %s, %d episodes, are lost", steps, sum(lost.values()))
        super().rewind(step)

    def step(self, batch: StepBatch, metrics: Mapping[str, Any], advantages: Tensor) -> None:
        """Everything of one step. The step's episodes are written first: the account is never behind the metrics."""
        episodes = [episode for group in batch.groups for episode in group]
        chosen = kept_of([t.reward for t in batch.trajectories], self._save_trajectories)
        # Keep the images of trajectories. A failure is logged: a record without its images is better than no record.
        for trajectory in (batch.trajectories[n] for n in chosen):
            try:
                if trajectory.images is not None:
                    keep_images(trajectory.images, self._images)
            except UnreadableImages as error:
                logger.warning("images of episode %s are not recorded: %s", trajectory.episode_id, error)
        weights = advantages.tolist()
        records = [readable_trajectory(batch.trajectories[n], weights[n], self._tokenizer) for n in chosen]
        with self._one_at_a_time:
            if batch.step not in self._passed:
                append_jsonl(self._steps, [{"step": batch.step, "version": batch.step + 1, "episodes": episodes}])
            for sink in self._sinks:
                sink.trajectories(batch.step, records)
            self.metrics(batch.step + 1, metrics)
        self._stopping.check(metrics)


def kept_of(rewards: Sequence[float | None], count: int) -> list[int]:
    """`count` places in order: the best, the worst, and the others evenly among those between. Ties: the first."""
    ranked = sorted(range(len(rewards)), key=lambda place: -(rewards[place] or 0.0))
    if count >= len(ranked) or count < 2:
        return sorted(ranked[:count])
    last = len(ranked) - 1
    return sorted({ranked[round(number * last / (count - 1))] for number in range(count)})


def load_tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        logger.warning("trajectories are written as token ids: %s has no tokenizer (%s)", model, error)
        return None


def readable_trajectory(trajectory: Trajectory, advantage: float | None, tokenizer: Any) -> dict[str, Any]:
    """Plain data; texts are lists of ids where `tokenizer` is None."""
    return {
        "episode_id": trajectory.episode_id,
        "reward": trajectory.reward,
        "advantage": advantage,
        "outcome": {
            "kind": str(trajectory.outcome.kind),
            "reason": trajectory.outcome.reason,
            "component": trajectory.outcome.component,
        },
        "num_turns": trajectory.num_turns,
        "data_source": trajectory.data_source,
        "metrics": dict(trajectory.metrics),
        "extra": dict(trajectory.extra),
        **({} if trajectory.images is None else {"images": [list(names) for names in trajectory.images.by_segment]}),
        "segments": [
            {
                "prompt": _text(segment.prompt_ids, tokenizer),
                "prompt_tokens": len(segment.prompt_ids),
                "prompt_ids": segment.prompt_ids.tolist(),
                "runs": [_run(segment, start, end, tokenizer) for start, end in mask_runs(segment.response_mask)],
            }
            for segment in trajectory.segments
        ],
    }


def _run(segment: Segment, start: int, end: int, tokenizer: Any) -> dict[str, Any]:
    sampled = bool(segment.response_mask[start])
    run: dict[str, Any] = {
        "mask": int(sampled),
        "tokens": end - start,
        "ids": segment.response_ids[start:end].tolist(),
        "text": _text(segment.response_ids[start:end], tokenizer),
    }
    if tokenizer is not None:
        run["ends"] = token_ends(segment.response_ids[start:end].tolist(), run["text"], tokenizer)
    if sampled:
        run["versions"] = [
            [int(version), int(min(last, end) - max(first, start))]
            for version, first, last in segment.version_spans
            if first < end and last > start
        ]
        run["logprobs"] = [round(float(value), 4) for value in segment.response_logprobs[start:end]]
    return run


def mask_runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """[T] → half-open ranges of equal mask, in order."""
    edges = np.flatnonzero(np.diff(mask)) + 1
    bounds = [0, *edges.tolist(), len(mask)]
    return [(start, end) for start, end in pairwise(bounds) if end > start]


def _text(ids: np.ndarray, tokenizer: Any) -> Any:
    return ids.tolist() if tokenizer is None else tokenizer.decode(ids.tolist(), skip_special_tokens=False)


MOST_BYTES = 4
"""Maximum bytes of one character: tokens that wait for longer do not begin a character."""


def token_ends(ids: Sequence[int], text: str, tokenizer: Any) -> list[int]:
    """[N] how many characters of `text` are there after each token; the last is its length.

    A character that several tokens make counts with the last of them.
    """
    pieces = {number: tokenizer.decode([number], skip_special_tokens=False) for number in set(ids)}
    if "".join(pieces[number] for number in ids) == text:
        return list(accumulate(len(pieces[number]) for number in ids))
    # Each token is decoded behind those before it: bytes join there, and blanks are kept as decoders keep them.
    ends: list[int] = []
    behind, read, length = 0, 0, 0
    for end in range(1, len(ids) + 1):
        now = tokenizer.decode(ids[behind:end], skip_special_tokens=False)
        # A decoder writes U+FFFD for bytes that are no whole character (yet).
        if not now.endswith("\ufffd") or end - read >= MOST_BYTES:
            before = tokenizer.decode(ids[behind:read], skip_special_tokens=False) if read > behind else ""
            length = min(len(text), length + max(0, len(now) - len(before)))
            behind, read = read, end
        ends.append(length)
    return [*ends[:-1], len(text)]
