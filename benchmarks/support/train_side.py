"""The seam between `trainer_child` and the ways of training that are compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from benchmarks.support.work import Work

LEARNING_RATE = 1e-6
MAX_GRAD_NORM = 1.0
BETAS = (0.9, 0.95)
CLIP_LOW, CLIP_HIGH = 0.2, 0.28


@dataclass(frozen=True)
class Settings:
    """What all sides are told alike."""

    model: str
    """Folder"""
    dtype: str
    """``float32`` or ``bfloat16``; master weights are float32 under both."""
    micro_rows: int
    """Rows of one forward and backward, of the sides that count rows."""
    micro_tokens: int
    """Tokens of one, of the side that counts tokens."""


@dataclass(frozen=True)
class Done:
    """One optimizer step over the whole batch."""

    seconds: float
    cpu_s: float
    """On a core, all threads"""
    grad_norm: float
    """Before clipping. Equal on all sides in the first step: they compute the same."""
    peak_bytes: int = 0
    """Where it was measured: the most that tensors took, above weights and moments."""
    tokens_computed: int = 0
    """Padding with them."""


class TrainSide(Protocol):
    """One way to train the same model on the same batch: GRPO's advantages, a clipped policy loss, mean over all
    sampled tokens, gradients clipped, AdamW. Constructed with `Settings`; `load` comes before `step`."""

    def load(self, work: Work) -> None: ...

    def step(self, *, memory: bool = False) -> Done:
        """`memory`: the peak is measured too, and the seconds are those of a step under a profiler."""

    def close(self) -> None: ...
