"""The learning rate of a step: linear warm-up, then constant or linear decay to a floor."""

from __future__ import annotations

from penstock.trainer.config import TrainerConfig


def learning_rate(config: TrainerConfig, step: int) -> float:
    """lr · warm-up(step) · decay(step), step from 0.

    warm-up = min(1, (step + 1) / warmup_steps); decay = 1, or with schedule ``linear``
    1 − (1 − lr_floor) · step / (steps − 1), so that the last step has lr · lr_floor.
    """
    warmup = min(1.0, (step + 1) / max(1, config.warmup_steps))
    if config.lr_schedule == "constant":
        return config.lr * warmup
    progress = min(1.0, step / max(1, config.steps - 1))
    return config.lr * warmup * (1.0 - (1.0 - config.lr_floor) * progress)
