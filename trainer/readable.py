"""A trajectory for people: the text of each run of fed and of sampled tokens, with versions and logprobs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from penstock.trainer.token_ends import token_ends
from penstock.transfer_queue import Segment, Trajectory


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
        "segments": [_segment(segment, tokenizer) for segment in trajectory.segments],
    }


def _segment(segment: Segment, tokenizer: Any) -> dict[str, Any]:
    return {
        "prompt": _text(segment.prompt_ids, tokenizer),
        "prompt_tokens": len(segment.prompt_ids),
        "runs": [_run(segment, start, end, tokenizer) for start, end in mask_runs(segment.response_mask)],
    }


def _run(segment: Segment, start: int, end: int, tokenizer: Any) -> dict[str, Any]:
    sampled = bool(segment.response_mask[start])
    run: dict[str, Any] = {
        "mask": int(sampled),
        "tokens": end - start,
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
