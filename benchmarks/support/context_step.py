"""A step on one long row whose tokens two ranks share out, and on one rank: context_step MODEL TOKENS ROUNDS FOLDER.

Prints one line of JSON: `seconds` and `cpu_s` (on a core) of the slowest rank in each round, and `grad_norm`, by side.
The other rank of the side `single` has no tokens: FSDP's shards are the same on both sides.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.comparison import in_turn
from benchmarks.support.forked_ranks import forked_ranks
from benchmarks.support.meter import Meter
from benchmarks.support.tree_step import segment_of
from penstock.trainer import ModelLimits, Pack, Ranks, TrainerConfig, make_row, pack_rows
from penstock.trainer.engines.fsdp import FSDPEngine

RANKS = 2
PROMPT = 8
SIDES = {"single": 1, "context": RANKS}
"""trainer.parallel.context"""


def pack_of(rows: int, tokens: int, vocab: int) -> Pack:
    """`rows` rows of together `tokens` tokens, of which all but `PROMPT` of each are sampled."""
    draw, limits = np.random.default_rng(0), ModelLimits(context=tokens, vocab=vocab)
    ids = [draw.integers(2, vocab, tokens // rows) for _ in range(rows)]
    segments = [segment_of(row[:PROMPT], row[PROMPT:]) for row in ids]
    (pack,) = pack_rows([make_row(n, one, "", step=0, bound=0, model=limits) for n, one in enumerate(segments)], tokens)
    return pack


def engine_of(model: str, context: int, everyone: Ranks) -> FSDPEngine:
    config = TrainerConfig.model_validate({"lr": 1e-12, "ranks": RANKS, "parallel": {"context": context}})
    ranks = Ranks(everyone.device, everyone.background, config.parallel.layout, everyone.timeout)
    return FSDPEngine(model, config, ranks)


def step(engine: FSDPEngine, packs: list[Pack], sampled: int, everyone: Ranks) -> dict[str, float]:
    """Return seconds and CPU seconds of one update on the slowest rank, and the gradient's norm."""
    everyone.meet()
    with Meter() as meter:
        update = engine.update(packs, lambda _, outputs: -outputs.logprobs.sum(), sampled, 0)
    seconds, cpu_s = everyone.max(meter.seconds), everyone.max(meter.cpu_s)
    return {"seconds": seconds, "cpu_s": cpu_s, "grad_norm": update.grad_norm}


def measure(model: str, tokens: int, rounds: int, everyone: Ranks) -> dict[str, Any]:
    engines = {side: engine_of(model, context, everyone) for side, context in SIDES.items()}
    row = pack_of(1, tokens, engines["single"].limits.vocab)
    steps: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for number in range(rounds + 1):
        for side in in_turn(list(SIDES), number):
            packs = [row] * (side == "context" or everyone.is_rank0)
            steps[side].append(step(engines[side], packs, len(row.targets), everyone))
    measured = {name: {side: [one[name] for one in steps[side][1:]] for side in SIDES} for name in ("seconds", "cpu_s")}
    return {"tokens": tokens, **measured, "grad_norm": {side: steps[side][0]["grad_norm"] for side in SIDES}}


def main(model: str, tokens: int, rounds: int, folder: Path) -> None:
    with forked_ranks(RANKS, folder) as ranks:
        figures = measure(model, tokens, rounds, ranks)
        if ranks.is_rank0:
            print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
