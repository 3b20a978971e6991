"""Columns of ``metrics.jsonl``, thinned to what a screen can show, and advice on how to split the devices.

One step takes `wall` seconds; the trainer works T = wall − wait of them. In a steady run one step's episodes are made
in the same wall, of which rollout workers are paused a share i because admission refuses them: R = wall · (1 − i).
With n_r devices for rollouts and n_t for training, device-seconds per step are R·n_r and T·n_t. Both halves take
equally long when their devices are in that ratio:

    share of devices for rollouts = R·n_r / (R·n_r + T·n_t)

It supposes that both halves speed up with their devices; that holds for small changes, so it is advice, not a plan.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from penstock.common import JsonlTail
from penstock.dashboard.jsonable import plain

Row = dict[str, Any]
HISTOGRAM = "staleness_tokens"


class MetricsFile:
    """Reads on from its last position; safe to ask from several threads."""

    def __init__(self, path: Path) -> None:
        self._tail = JsonlTail(path)
        self._rows: dict[int, Row] = {}
        self._lock = threading.Lock()

    def rows(self) -> list[Row]:
        """One per step, in order. A line for a step ends what was known of later ones: they are trained again."""
        with self._lock:
            new = self._tail.read()
            if new:
                first = int(new[0]["step"])
                self._rows = {step: row for step, row in self._rows.items() if step < first}
            for row in new:
                wall_s, wait_s = row.get("wall_s"), row.get("wait_s")
                if wall_s and wait_s is not None:
                    row["bubble"] = wait_s / wall_s  # the share of the step in which there was nothing to train on
                self._rows[int(row["step"])] = row
            return [self._rows[step] for step in sorted(self._rows)]


def newest_row(path: Path) -> Row | None:
    """The last whole line, without reading those before; None if there is none."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - (1 << 16)))
        lines = file.read().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith(b"\n")]
    row: Row | None = json.loads(whole[-1]) if whole else None
    return row


def column_names(rows: Sequence[Row]) -> list[str]:
    """Every name that holds numbers, sorted; without the step itself."""
    # Columns are named after the first row and the newest 200.
    names = {name for row in [*rows[:1], *rows[-200:]] for name, value in row.items() if _is_number(value)}
    return sorted(names - {"step"})


def columns(rows: Sequence[Row], names: Sequence[str], points: int) -> dict[str, Any]:
    """``steps`` and ``series``: at most `points` buckets of neighbouring steps, each its last step and its mean."""
    buckets = _buckets(rows, points)
    series = {name: [_mean([row.get(name) for row in bucket]) for bucket in buckets] for name in names}
    return {"steps": [bucket[-1]["step"] for bucket in buckets], "series": series}


def staleness(rows: Sequence[Row], points: int) -> dict[str, Any]:
    """``steps``, ``ages`` and ``shares`` [bucket][age]: the share of trained tokens of each age in versions."""
    buckets = _buckets([row for row in rows if row.get(HISTOGRAM)], points)
    totals = [sum((Counter({int(age): n for age, n in row[HISTOGRAM].items()}) for row in bucket), Counter())
              for bucket in buckets]  # fmt: skip
    ages = list(range(max((age for total in totals for age in total), default=-1) + 1))
    shares = [[total[age] / total.total() for age in ages] for total in totals]
    return {"steps": [bucket[-1]["step"] for bucket in buckets], "ages": ages, "shares": shares}


def _buckets(rows: Sequence[Row], points: int) -> list[Sequence[Row]]:
    size = max(1, -(-len(rows) // points))
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _mean(values: Sequence[Any]) -> float | None:
    numbers = [value for value in values if _is_number(value)]
    mean: float | None = plain(sum(numbers) / len(numbers)) if numbers else None
    return mean


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


RECENT_STEPS = 20
NOTABLE = 0.15
"""Waiting for less of the time than this is left alone."""


@dataclass(frozen=True, slots=True)
class Devices:
    """The split of a run: engines' and trainer's devices."""

    rollout: int
    trainer: int


@dataclass(frozen=True, slots=True)
class Split:
    """Advice on the split of devices, from the newest steps."""

    steps: int
    bubble: float | None
    """Share of the wall time in which the trainer waited for a batch; None before the first step."""
    rollout_idle: float | None
    """Share of the rollout slots' time that admission held back; None where the queue is not there to say."""
    rollout_share: float | None
    """Share of all devices that rollouts should get."""
    advice: str
    warning: str = ""
    """See `reward_warning`."""


def advise(rows: Sequence[Mapping[str, Any]], rollout_idle: float | None, devices: Devices) -> Split:
    """Return advice from rows of ``metrics.jsonl``, oldest first. The first step, which waits for the start, does not
    count.
    """
    recent = [row for row in rows[1:] if row.get("wall_s")][-RECENT_STEPS:]
    wall_s, wait_s = sum(row["wall_s"] for row in recent), sum(row.get("wait_s", 0.0) for row in recent)
    warning = reward_warning(rows)
    if not wall_s:
        return Split(0, None, rollout_idle, None, "No step to judge by yet.", warning)
    bubble = min(1.0, wait_s / wall_s)
    rollout_share, trained = (1 - (rollout_idle or 0.0)) * devices.rollout, (1 - bubble) * devices.trainer
    share = rollout_share / (rollout_share + trained) if rollout_share + trained else None
    return Split(len(recent), bubble, rollout_idle, share, _words(bubble, rollout_idle, share, devices), warning)


FLAT = 1e-6
"""Standard deviation of rewards below which they are equal: sums of squares are rounded."""


FALL_STEPS = 5
"""Steps whose mean reward is compared with the best mean of as many steps."""


def reward_warning(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence if many attempts fail, or if the newest rewards are all equal or have fallen far below their
    best; else an empty one.

    `rows`: lines of ``metrics.jsonl``, oldest first.
    """
    return (
        _lost_attempts(rows)
        or _flat_rewards(rows)
        or _fallen_reward([row["reward"] for row in rows if "reward" in row])
    )


def _lost_attempts(rows: Sequence[Mapping[str, Any]]) -> str:
    recent = rows[-FALL_STEPS:]
    failed = sum(row.get("attempts_failed", 0) for row in recent)
    attempts = failed + sum(row.get("episodes", 0) for row in recent)
    # If more than a tenth of the attempts fail, the failures choose what the model learns from.
    if failed <= 0.1 * attempts:
        return ""
    causes: Counter[str] = Counter()
    for row in recent:
        causes.update(row.get("faults", {}))
    return (
        f"{failed} of {attempts} attempts at episodes failed lately. Only the others are trained on, so the model "
        "learns to avoid whatever fails, good actions too. Commonest faults of these steps: "
        f"{', '.join(f'{cause} ({count})' for cause, count in causes.most_common(2))}. "
        "Correct the cause; your own code can return a reward instead of raising."
    )


def _fallen_reward(rewards: Sequence[float]) -> str:
    if len(rewards) < 2 * FALL_STEPS:
        return ""
    means = [fmean(rewards[end - FALL_STEPS : end]) for end in range(FALL_STEPS, len(rewards) + 1)]
    best, newest = max(means), means[-1]
    gained = best - min(rewards)
    if best <= 0 or newest > best / 2 or gained < 0.05:
        return ""
    return f"The mean reward of {FALL_STEPS} steps fell from {best:.2f} to {newest:.2f}: {_spoilt()}"


def _spoilt() -> str:
    return (
        "training spoils the model. Start again under another name with a lower trainer.lr (a tenth, to begin with), "
        "and for a small model with a larger trainer.eps; `penstock train export` writes an earlier checkpoint as a "
        "model."
    )


def _flat_rewards(rows: Sequence[Mapping[str, Any]]) -> str:
    flat: list[Mapping[str, Any]] = []
    for row in reversed(rows):
        if row.get("reward_std", 1.0) > FLAT:
            break
        flat.append(row)
    if len(flat) < 3:  # three steps in a row are a warning
        return ""
    zero = all(abs(row["reward"]) <= FLAT for row in flat)
    earlier = [row["reward"] for row in rows[: -len(flat)] if "reward" in row]
    if earlier and min(row["reward"] for row in flat) >= max(earlier) > min(earlier) + FLAT:
        return ""  # every task of these steps is solved
    faults: Counter[str] = Counter()
    for row in flat:
        faults.update(row.get("faults", {}))
    warning = f"All rewards of each of the last {len(flat)} steps are {'0' if zero else 'equal'}: nothing is learnt"
    if zero and earlier and (mean := fmean(earlier)) >= 0.05:
        common = f" Commonest fault: {faults.most_common(1)[0][0]}." if faults else ""
        return f"{warning}. Their mean was {mean:.2f} before: {_spoilt()}{common}"
    return f"{warning}. {_cause(faults, sum(row.get('episodes', 0) for row in flat))}"


def _cause(faults: Counter[str], episodes: int) -> str:
    """The cause of rewards that are all equal, in a sentence, or where to look for it."""
    cause, count = faults.most_common(1)[0] if faults else ("", 0)
    share = f"{cause}: {count} of {episodes} episodes"
    if not count or 10 * count < episodes:  # fewer than a tenth do not make all rewards equal
        rare = f"The commonest fault ({share}) is too rare to be the cause" if count else "No episode had a fault"
        return f"{rare}: look at what the reward compares (trajectories, penstock rehearse)."
    if cause.startswith("truncated (turns"):  # a loop may use all its turns by design: the reward is looked at first
        return f"Look at what the reward compares (penstock rehearse); {count} of {episodes} are {cause}."
    texts = "; trajectories and penstock rehearse show its texts" if cause.endswith("answered with an error") else ""
    return f"Commonest cause: {cause} ({count} of {episodes} episodes){texts}."


def _words(bubble: float, idle: float | None, share: float | None, devices: Devices) -> str:
    if bubble < NOTABLE and (idle or 0.0) < NOTABLE:
        return "Well balanced: neither half waits much for the other."
    if bubble >= NOTABLE and (idle or 0.0) >= NOTABLE:
        return (
            f"Both halves wait: the trainer {bubble:.0%} of the time, rollouts {idle:.0%}. That is lock-step, not "
            "capacity: a larger max_staleness lets them overlap; look for long episodes that hold whole groups."
        )
    if bubble >= NOTABLE:
        change = f"about {1 / max(1 - bubble, 0.01):.1f} times the rollout capacity (rollout.servers)"
        return f"The trainer waits {bubble:.0%} of the time for batches: give it {change}{_instead(share, devices)}."
    return f"Rollouts are paused {idle:.0%} of the time: the trainer is the slower half{_instead(share, devices)}."


def _instead(share: float | None, devices: Devices) -> str:
    total = devices.rollout + devices.trainer
    if share is None or total < 3:
        return ""
    rollouts = min(total - 1, max(1, round(share * total)))
    if rollouts == devices.rollout:
        return f"; {share:.0%} of the devices for rollouts would balance them"
    return f"; with the same {total} devices: {rollouts} for rollouts, {total - rollouts} for training"
