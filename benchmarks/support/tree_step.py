"""A step on an episode whose template strips thinking, its rows in one tree and apart: tree_step MODEL ROUNDS.

Prints one line of JSON. Row t of the episode has the prompt, the calls and results of all turns before t, and the
thinking and the call of turn t.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.support.meter import Meter
from penstock.trainer import Learner, Ranks, StepBatch, TrainerConfig, make_step_batch
from penstock.trainer.advantages import Advantages
from penstock.trainer.engines.fsdp import FSDPEngine
from penstock.transfer_queue import COMPLETED, Batch, Segment, Trajectory

TURNS = 20
PROMPT, THINKING, CALL, RESULT = 100, 20, 12, 68
TIMEOUT_S = 600.0


def episode(vocab: int) -> Trajectory:
    """An episode of the engine's own version. Its logprobs are arbitrary: both sides train on the same."""
    draw = np.random.default_rng(0)
    history, segments = draw.integers(2, vocab, PROMPT), []
    for _ in range(TURNS):
        thinking, call, result = (draw.integers(2, vocab, length) for length in (THINKING, CALL, RESULT))
        segments.append(segment_of(history, np.concatenate([thinking, call])))
        history = np.concatenate([history, call, result])
    return Trajectory("train/0#0", "train/0", segments, 1.0, COMPLETED, num_turns=TURNS)


def segment_of(prompt: Any, sampled: Any) -> Segment:
    return Segment(
        prompt_ids=prompt.astype(np.int32),
        response_ids=sampled.astype(np.int32),
        response_mask=np.ones(len(sampled), dtype=np.uint8),
        response_logprobs=np.full(len(sampled), -3.0, dtype=np.float32),
        version_spans=np.array([[0, 0, len(sampled)]], dtype=np.int32),
        turn_starts=np.array([0], dtype=np.int32),
    )


def step(learner: Learner, batch: StepBatch) -> tuple[float, dict[str, Any]]:
    """(seconds on a core, metrics)"""
    same = Advantages(torch.ones(sum(len(row.targets) for row in batch.rows), dtype=torch.float64))
    with Meter() as meter:
        metrics = learner.update(batch, learner.score(batch), same)
    return meter.cpu_s, metrics


def main(model: str, rounds: int) -> None:
    ranks = Ranks.open(TIMEOUT_S)
    try:
        config = TrainerConfig(lr=1e-12, micro_batch_tokens=1 << 14)
        engine = FSDPEngine(model, config, ranks)
        learner, only = Learner(config, engine, ranks.data), episode(engine.limits.vocab)
        batch = make_step_batch(Batch(0, [[only.episode_id]]), [0], [only], 0, engine.limits)
        seconds: dict[str, list[float]] = {"tree": [], "apart": []}
        metrics: dict[str, Any] = {}
        for number in range(rounds + 1):
            for side in seconds:
                engine.policy.unshared_because = "" if side == "tree" else "it is measured"
                cpu_s, metrics[side] = step(learner, replace(batch, rows=list(batch.rows)))
                seconds[side] += [cpu_s] * (number > 0)  # the first one is not measured
    finally:
        ranks.close()
    tokens, saved = metrics["tree"]["tokens"], metrics["tree"]["prefix_tokens_saved"]
    longest = max(len(row.ids) for row in batch.rows)
    norms = {side: metrics[side]["grad_norm"] for side in seconds}
    sizes = {"tokens": tokens, "computed": tokens - saved, "longest": longest}
    print(json.dumps({**sizes, "cpu_s": seconds, "grad_norm": norms}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
