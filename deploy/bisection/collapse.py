"""The fall of a metric in a run's own records, and the stretch of steps that is searched for its cause.

    metrics.jsonl   ──► the last healthy step ··· the first step below the bound
                                 │                          │
    archive's index ──►  versions that sampled it    versions that sampled it
                                 │                          │
    checkpoints     ──►  START = the newest one     END = the newest version: its weights have collapsed
                         at or before them

Steps START … END − 1 made those weights, and one of them did it. A step's own metric says how the versions before it
act: the batch of the first step below the bound is a consequence and no suspect, unless those versions do well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from statistics import median

from penstock.common import last_by, read_jsonl
from penstock.deploy.recipe_tree import ConfigError
from penstock.deploy.run_dir import RunDir
from penstock.transfer_queue import Archive

METRICS = {
    "reward": "reward",
    "num_turns_mean": "num_turns",
    "response_length_mean": "response_tokens",
}
"""Metric of ``metrics.jsonl`` that an evaluation measures too → field of its episodes."""


@dataclass(frozen=True, slots=True)
class Fall:
    """A metric's fall below a bound."""

    steps: Sequence[int]
    """Steps below the bound, one after the other, from the first one on."""
    healthy: int
    """The last step before them that was nearer to the usual value, a median, than to the bound."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps `start` … `end` − 1 of a run."""

    start: int
    """The checkpoint after that many steps; 0: the model."""
    end: int
    """The version of the weights after them, which have collapsed."""
    step: int
    """The step that shows it: the newest version that sampled its batch is `end`."""
    healthy: Sequence[int]
    """Versions that should not have collapsed, in the order in which a search tries them: `start`, which leaves most
    steps to blame, and those that sampled the last healthy step, if the model had yet to learn at `start`."""

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(range(self.start, self.end))


def recorded_metric(run: RunDir, metric: str) -> dict[int, float]:
    """Return the metric by step. Raises `ConfigError` for one that no evaluation measures, and for a run without it."""
    if metric not in METRICS:
        raise ConfigError(
            f"--metric {metric}: a replay is judged by episodes, which measure {', '.join(METRICS)}; choose one of them"
        )
    lines = last_by(read_jsonl(run.metrics), "step")
    values = {line["step"]: float(line[metric]) for line in lines if line.get(metric) is not None}
    if not values:
        raise ConfigError(f"{run.metrics}: no step has the metric {metric}; bisect needs the records of a trained run")
    return {step: value for step, value in values.items() if math.isfinite(value)}


def fall_of(values: Mapping[int, float], below: float, first: int = 0) -> Fall:
    """Return the first fall from step `first` on: two steps in a row below the bound, or the last one, after one that
    was not. Raises `ConfigError` if there is none."""
    steps = [step for step in sorted(values) if step >= first]
    if not any(values[step] < below for step in steps):
        lowest = min((values[step] for step in steps), default=math.nan)
        raise ConfigError(
            f"--below {below:g}: from step {first} on the metric is never below it (its lowest is {lowest:.4g}); "
            "give a greater bound"
        )
    reached = [step for step in steps if values[step] >= below]
    if not reached:
        raise ConfigError(
            f"--below {below:g}: the metric is below it at every step from {first} on, so it never fell; its greatest "
            f"is {max(values[step] for step in steps):.4g}, give a lower bound"
        )
    later = [step for step in steps if step > reached[0]]
    for step, following in pairwise([*later, math.inf]):
        if values[int(step)] < below and (following == math.inf or values[int(following)] < below):
            return _fall_at(int(step), steps, values, below)
    raise ConfigError(
        f"--below {below:g}: after step {reached[0]} only single steps are below it, which is the noise of a batch; "
        "give a greater bound"
    )


def _fall_at(step: int, steps: Sequence[int], values: Mapping[int, float], below: float) -> Fall:
    before = [one for one in steps if one < step]
    # The median, since a broken reward may be a million in one step.
    usual = median(values[one] for one in before if values[one] >= below)
    healthy = max(one for one in before if values[one] >= (usual + below) / 2)
    low = takewhile(lambda one: values[one] < below, (one for one in steps if one >= step))
    return Fall(list(low), healthy)


def stretches_of(run: RunDir, archive: Archive, fall: Fall) -> Iterator[Stretch]:
    """Yield the stretches to search, that of the first step below the bound first. Raises `ConfigError` naming the
    steps that the archive lacks, `BadPayload`."""
    stored = set(archive.steps())
    if missing := [one for one in (fall.healthy, *fall.steps[:1]) if one not in stored]:
        raise ConfigError(
            f"{archive.folder}: step {missing[0]} is not there, whose metric shows the fall; archived are "
            f"{_in_words(stored)}. A run keeps what transfer_queue.archive_bytes allows"
        )
    versions = _versions(archive, [fall.healthy, *(one for one in fall.steps if one in stored)])
    start = _start(run, stored, versions[fall.healthy][0])
    ends: dict[int, int] = {}
    for step in fall.steps:
        if step in versions and versions[step][1] > start:
            ends.setdefault(versions[step][1], step)
    for end, step in ends.items():
        if stored.issuperset(range(start, end)):
            versions_before = (start, *(min(one, end - 1) for one in versions[fall.healthy]))
            yield Stretch(start, end, step, tuple(dict.fromkeys(versions_before)))


def _start(run: RunDir, stored: set[int], version: int) -> int:
    """The newest checkpoint at or before `version` from which every step is archived. Raises `ConfigError`."""
    saved = sorted({0, *(int(one.name[5:]) for one in run.checkpoints.glob("step_*") if not one.suffix)})
    usable = [one for one in saved if one <= version and stored.issuperset(range(one, version))]
    if not usable:
        raise ConfigError(
            f"{run.root}: no checkpoint at or before version {version}, the oldest that sampled the last healthy step, "
            f"has all later steps in the archive. Checkpoints: {', '.join(map(str, saved))}; archived: "
            f"{_in_words(stored)}. trainer.keep_checkpoints and transfer_queue.archive_bytes keep more"
        )
    return usable[-1]


def _versions(archive: Archive, steps: Sequence[int]) -> dict[int, tuple[int, int]]:
    """The oldest and the newest version that sampled each step's batch."""
    versions = {}
    for step in steps:
        names = [one for group in archive.batches(step, step + 1)[step] for one in group]
        spans = [s.version_spans for one in archive.read(step, names).values() for s in one.segments]
        sampled = [int(version) for one in spans for version in one[:, 0]]
        if sampled:
            versions[step] = (min(sampled), max(sampled))
    return versions


def _in_words(steps: set[int]) -> str:
    return f"steps {min(steps)} to {max(steps)}" if steps else "no steps"
