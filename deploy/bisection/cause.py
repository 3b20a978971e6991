"""The cause of a collapse: stretch, steps, episodes.

all steps of the stretch        ──► below the bound: the collapse is reproduced, else a later step shows it
none of them                    ──► not below it: the start is healthy
smallest set of steps           ──► whose removal keeps the metric from falling (`smallest_set`)
smallest set of their episodes  ──► likewise
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from penstock.deploy.bisection.collapse import Stretch
from penstock.deploy.bisection.search import OutOfTries, SmallestSet, smallest_set
from penstock.deploy.bisection.tries import Tries, TryResult
from penstock.deploy.recipe_tree import ConfigError
from penstock.transfer_queue import Archive


@dataclass(frozen=True, slots=True)
class Suspect:
    """An episode that was trained."""

    episode: str
    step: int
    reward: float
    unlike: float
    """Distance of its reward from the median of its step."""


@dataclass(frozen=True, slots=True)
class Cause:
    """The result of a bisection."""

    stretch: Stretch
    with_all: TryResult
    steps: SmallestSet[int]
    without_steps: TryResult
    episodes: SmallestSet[Suspect]
    of_episodes: int
    """Episodes of `steps`."""
    without_episodes: TryResult
    tries: int
    undecided: int
    """Tries whose batches could not be trained."""
    close: int
    """Tries whose interval includes the bound."""

    def as_json(self) -> dict[str, Any]:
        """The report of `penstock bisect --json`, without the names of run and metric."""
        return {
            "shown_by_step": self.stretch.step,
            "start": self.stretch.start,
            "version": self.stretch.end,
            "with": asdict(self.with_all),
            "steps": list(self.steps.items),
            "steps_are_smallest": self.steps.is_minimal,
            "without_steps": asdict(self.without_steps),
            "episodes": [
                {"episode": one.episode, "step": one.step, "reward": one.reward} for one in self.episodes.items
            ],
            "of_episodes": self.of_episodes,
            "episodes_are_smallest": self.episodes.is_minimal,
            "without_episodes": asdict(self.without_episodes),
            "tries": self.tries,
            "tries_undecided": self.undecided,
            "tries_close": self.close,
        }


def cause_of(tries: Tries, stretches: Iterable[Stretch], archive: Archive) -> Cause:
    """Search the first stretch whose replay has collapsed. Raises `ConfigError` if none has, if its start has too, and
    if the tries do not suffice for that."""
    try:
        stretch, with_all = _reproduced(tries, stretches)
        suspected = _suspected(tries, stretch)
    except OutOfTries as error:
        raise ConfigError(f"--tries {tries.most}: used up before the search began; give more") from error
    steps = smallest_set(suspected, lambda part: tries.undoes(stretch, part, f"without {steps_in_words(part)}"))
    suspects = {one.episode: one for one in suspects_of(archive, steps.items)}
    of_all = f"of the {len(suspects)} episodes of {steps_in_words(steps.items)}"
    episodes = smallest_set(tuple(suspects), lambda part: tries.undoes(stretch, part, f"without {len(part)} {of_all}"))
    # Without all of them is without the steps, which has been tried.
    without = steps.items if len(episodes.items) == len(suspects) else episodes.items
    return Cause(
        stretch=stretch,
        with_all=with_all,
        steps=steps,
        without_steps=tries(stretch, steps.items, ""),
        episodes=SmallestSet(tuple(suspects[one] for one in episodes.items), episodes.is_minimal),
        of_episodes=len(suspects),
        without_episodes=tries(stretch, without, ""),
        tries=len(tries.results),
        undecided=sum(one.value is None for one in tries.results),
        close=sum(one.is_close_to(tries.judgement.below) for one in tries.results),
    )


def _reproduced(tries: Tries, stretches: Iterable[Stretch]) -> tuple[Stretch, TryResult]:
    judgement, result = tries.judgement, None
    for stretch in stretches:
        result = tries(stretch, (), f"all of {steps_in_words(stretch.steps)}, up to version {stretch.end}")
        if result.value is not None and result.value < judgement.below:
            return stretch, result
    if result is None:
        raise ConfigError(
            "the archive has no trained step between a healthy checkpoint and the versions that sampled the steps "
            f"below {judgement.below:g}; keep more checkpoints and steps (trainer.keep_checkpoints, "
            "transfer_queue.archive_bytes)"
        )
    raise ConfigError(
        f"--below {judgement.below:g}: the replayed weights are not below it (at last {judgement.metric} "
        f"{result.value:.4g}): the fall is in the batches, their rewards or their noise, and not in the weights. "
        "`penstock archive compare` compares the batches; for a later fall give a lower bound, or --from"
    )


def _suspected(tries: Tries, stretch: Stretch) -> tuple[int, ...]:
    """The steps after the first healthy version."""
    for version in stretch.healthy:
        steps = tuple(range(version, stretch.end))
        if tries.undoes(stretch, steps, f"without {steps_in_words(steps)}"):
            return steps
    raise ConfigError(
        f"--below {tries.judgement.below:g}: the weights of versions {', '.join(map(str, stretch.healthy))}, before "
        "the fall, are below it themselves, so that no later step explains it. Give a lower bound, or keep more "
        "checkpoints (trainer.keep_checkpoints)"
    )


def suspects_of(archive: Archive, steps: Sequence[int]) -> list[Suspect]:
    """Return the episodes of these steps, those whose reward is least like the others' of their step first: guilty
    ones are often neighbours then, and neighbours are separated from the rest together."""
    suspects = []
    for step in steps:
        names = [one for group in archive.batches(step, step + 1)[step] for one in group]
        rewards = {name: one.reward or 0.0 for name, one in archive.read(step, names).items()}
        middle = median(rewards.values())
        suspects += [Suspect(name, step, reward, abs(reward - middle)) for name, reward in rewards.items()]
    return sorted(suspects, key=lambda one: -one.unlike)


def steps_in_words(steps: Sequence[int]) -> str:
    """Return ``step 3`` or ``steps 3-5, 9``."""
    ordered = sorted(steps)
    breaks = [at for at, (one, following) in enumerate(pairwise(ordered), start=1) if following > one + 1]
    runs = [ordered[start:end] for start, end in zip([0, *breaks], [*breaks, len(ordered)], strict=True)]
    words = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs if run)
    return f"step {words}" if len(ordered) == 1 else f"steps {words}"
