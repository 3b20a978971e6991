"""Which half of a run waits for the other, and how to split the devices so that neither does.

One step takes `wall` seconds; the trainer works T = wall − wait of them. In a steady run one step's episodes are made
in the same wall, of which rollout workers stand still a share i because admission refuses them: R = wall · (1 − i).
With n_r devices for rollouts and n_t for training, device-seconds per step are R·n_r and T·n_t. Both halves take
equally long when their devices are in that ratio:

    share of devices for rollouts = R·n_r / (R·n_r + T·n_t)

It supposes that both halves speed up with their devices; that holds for small changes, so it is advice, not a plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RECENT_STEPS = 20
NOTABLE = 0.15
"""Waiting for less of the time than this is left alone."""


@dataclass(frozen=True, slots=True)
class Devices:
    """How a run is split: engines' and trainer's devices."""

    rollout: int
    trainer: int


@dataclass(frozen=True, slots=True)
class Split:
    """What the newest steps say."""

    steps: int
    bubble: float | None
    """Share of the wall time in which the trainer waited for a batch; None before the first step."""
    rollout_idle: float | None
    """Share of the rollout slots' time that admission held back; None where the queue is not there to say."""
    rollout_share: float | None
    """Of all devices, to be given to rollouts."""
    advice: str


def advise(rows: Sequence[Mapping[str, Any]], rollout_idle: float | None, devices: Devices) -> Split:
    """From rows of ``metrics.jsonl``, oldest first, without the first step, which waits for everything to start."""
    recent = [row for row in rows[1:] if row.get("wall_s")][-RECENT_STEPS:]
    wall_s, wait_s = sum(row["wall_s"] for row in recent), sum(row.get("wait_s", 0.0) for row in recent)
    if not wall_s:
        return Split(0, None, rollout_idle, None, "No step to judge by yet.")
    bubble = min(1.0, wait_s / wall_s)
    made, trained = (1 - (rollout_idle or 0.0)) * devices.rollout, (1 - bubble) * devices.trainer
    share = made / (made + trained) if made + trained else None
    return Split(len(recent), bubble, rollout_idle, share, _words(bubble, rollout_idle, share, devices))


def _words(bubble: float, idle: float | None, share: float | None, devices: Devices) -> str:
    if bubble < NOTABLE and (idle or 0.0) < NOTABLE:
        return "Well balanced: neither half waits much for the other."
    if bubble >= NOTABLE and (idle or 0.0) >= NOTABLE:
        return (
            f"Both halves wait: the trainer {bubble:.0%} of the time, rollouts {idle:.0%}. That is lock-step, not "
            "capacity: a larger max_staleness lets them overlap; look for long episodes that hold whole groups."
        )
    if bubble >= NOTABLE:
        change = f"about {1 / max(1 - bubble, 0.01):.1f} times the rollout capacity"
        return f"The trainer waits {bubble:.0%} of the time for batches: give it {change}{_instead(share, devices)}."
    return f"Rollouts stand still {idle:.0%} of the time: the trainer is the slower half{_instead(share, devices)}."


def _instead(share: float | None, devices: Devices) -> str:
    if share is None:
        return ""
    total = devices.rollout + devices.trainer
    wanted = min(total - 1, max(1, round(share * total)))
    if total < 3 or wanted == devices.rollout:
        return f"; {share:.0%} of the devices for rollouts would balance them"
    return f"; with the same {total} devices: {wanted} for rollouts, {total - wanted} for training"
