"""`penstock archive compare`, `group` and `diff`: questions about the episodes that a run trained on."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile, zip_longest
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.deploy.commands.archive import app, opened, record_of, records, trajectories
from penstock.deploy.commands.shared import RUNS, AsJson, RunName, RunsDir, user_errors
from penstock.deploy.recipe_tree import ConfigError
from penstock.transfer_queue import BadPayload

if TYPE_CHECKING:
    from penstock.transfer_queue import Trajectory

COLOURS = {"-": "red", "+": "green"}
Steps = Annotated[str, typer.Argument(help="A step, or FIRST-LAST; steps count from 0.", metavar="STEPS")]
Stretch = Sequence[tuple[int, "Trajectory"]]
"""Episodes with their steps."""


@dataclass(frozen=True, slots=True)
class EpisodeLine:
    """An episode in a list."""

    episode: str
    step: int
    reward: float
    fault: str


@dataclass(frozen=True, slots=True)
class TaskChange:
    """A task that both stretches have."""

    before: float
    """The mean reward in the first stretch."""
    after: float
    best_before: str
    """The best episode of the first stretch."""
    worst_after: str
    """The worst episode of the second stretch."""


@dataclass(frozen=True, slots=True)
class EpisodePart:
    """A prompt, or a run of ids that were sampled or fed."""

    kind: str
    ids: Sequence[int]
    text: str


@app.command()
def compare(
    run: RunName,
    first: Steps,
    second: Steps,
    limit: Annotated[int, typer.Option(min=1, help="Lines per list.")] = 5,
    runs_dir: RunsDir = RUNS,
    *,
    as_json: AsJson = False,
) -> None:
    """Compare two stretches of steps: rewards, the tasks that both have, faults that grew, worst and best episodes.

    Two tasks are the same if their prompts are. `penstock archive show` reads an episode, `diff` compares two.

    Example: penstock archive compare calculator 0-9 40-49
    """
    with user_errors(BadPayload):
        comparison = compared(_stretch(run, runs_dir, first), _stretch(run, runs_dir, second), limit)
    if as_json:
        print(json.dumps(comparison))
        return
    for steps, sums in zip((first, second), comparison["stretches"], strict=True):
        print(
            f"steps {steps}: {sums['episodes']} episodes, mean reward {sums['reward']:.4g}, "
            f"{sums['tokens']:.0f} tokens each"
        )
    print(f"tasks in both: {comparison['tasks']}")
    for word in ("fallen", "risen"):
        for task in comparison[word]:
            episodes = f"best before {task['best_before']}, worst after {task['worst_after']}"
            print(f"{word}  {task['before']:.4g} -> {task['after']:.4g}  {episodes}")
    for fault, (before, after) in comparison["faults"].items():
        print(f"fault  {before:.1%} -> {after:.1%}  {fault}")
    for word in ("worst", "best"):
        for line in comparison[word]:
            print(f"{word}  {line['reward']:.4g}  {line['episode']}  step {line['step']}  {line['fault']}".rstrip())


def compared(first: Stretch, second: Stretch, limit: int) -> dict[str, Any]:
    """Return what `penstock archive compare --json` prints.

    `fallen` and `risen` are the tasks whose mean reward changed most, `faults` the shares of episodes with each fault,
    that which grew most first, `worst` and `best` episodes of the second stretch.
    """
    changes = sorted(_changes(first, second), key=lambda task: task.after - task.before)
    lines = sorted((_line(*one) for one in second), key=lambda line: line.reward)
    return {
        "stretches": [_sums(stretch) for stretch in (first, second)],
        "tasks": len(changes),
        "fallen": [asdict(task) for task in changes[:limit] if task.after < task.before],
        "risen": [asdict(task) for task in changes[::-1][:limit] if task.after > task.before],
        "faults": _faults(first, second),
        "worst": [asdict(line) for line in lines[:limit]],
        "best": [asdict(line) for line in lines[::-1][:limit]],
    }


def _stretch(run: str, runs_dir: Path, steps: str) -> Stretch:
    """Raises `ConfigError`, `BadPayload`."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", steps)
    if match is None:
        raise ConfigError(f"{steps!r}: write a step, or FIRST-LAST such as 0-9")
    where = [f"step>={match[1]}", f"step<={match[2] or match[1]}"]
    stretch = [(step, trajectory) for step, _, trajectory in trajectories(opened(run, runs_dir), where)]
    if not stretch:
        raise ConfigError(f"{steps}: not in the archive of {run}; `penstock archive ls {run}` lists its steps")
    return stretch


def _sums(stretch: Stretch) -> dict[str, float]:
    rewards = [trajectory.reward or 0.0 for _, trajectory in stretch]
    tokens = fmean(trajectory.num_sampled for _, trajectory in stretch)
    return {"episodes": len(stretch), "reward": fmean(rewards), "tokens": tokens}


def _changes(first: Stretch, second: Stretch) -> Iterator[TaskChange]:
    by_prompt = [defaultdict[bytes, list[EpisodeLine]](list) for _ in range(2)]
    for tasks, stretch in zip(by_prompt, (first, second), strict=True):
        for step, trajectory in stretch:
            tasks[trajectory.segments[0].prompt_ids.tobytes()].append(_line(step, trajectory))
    for prompt in by_prompt[0].keys() & by_prompt[1].keys():
        before, after = (sorted(tasks[prompt], key=lambda line: line.reward) for tasks in by_prompt)
        yield TaskChange(
            fmean(line.reward for line in before),
            fmean(line.reward for line in after),
            before[-1].episode,
            after[0].episode,
        )


def _line(step: int, trajectory: Trajectory) -> EpisodeLine:
    return EpisodeLine(trajectory.episode_id, step, trajectory.reward or 0.0, trajectory.fault)


def _faults(*stretches: Stretch) -> dict[str, list[float]]:
    counts = [Counter(trajectory.fault for _, trajectory in stretch) for stretch in stretches]
    shares = {
        fault: [count[fault] / len(stretch) for count, stretch in zip(counts, stretches, strict=True)]
        for fault in counts[0] | counts[1]
        if fault
    }
    return dict(sorted(shares.items(), key=lambda item: item[1][0] - item[1][1]))


@app.command()
def group(run: RunName, task: str, runs_dir: RunsDir = RUNS, *, as_json: AsJson = False) -> None:
    """Show what each episode of a task earned, and where it parts from the best one.

    Example: penstock archive group calculator train/0000/00000007
    """
    with user_errors(BadPayload):
        members = sorted(records(run, runs_dir, [f"task={task}"]), key=lambda one: -(one["reward"] or 0.0))
        if not members:
            raise ConfigError(f"{task}: not in the archive of {run}; `penstock archive ls {run} --by task` lists them")
    lines = [
        {"episode": one["episode_id"], "reward": one["reward"], "parts": parting(members[0], one)} for one in members
    ]
    if as_json:
        print(json.dumps(lines))
        return
    for line in lines:
        place = line["parts"]
        where = f"turn {place['turn']}: {place['other']!r}, the best: {place['best']!r}" if place else "as the best"
        print(f"{line['episode']}  reward {line['reward']}  {where}")


def parting(best: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the turn, from 1, in which `other` first has other ids than `best`, and 60 characters of both texts from
    there on; None if all are equal. The episodes are those of `records`."""
    turn = 0
    for ours, theirs in zip_longest(_parts(best), _parts(other)):
        turn += any(part is not None and part.kind == "sampled" for part in (ours, theirs))
        if ours is None or theirs is None or ours.ids != theirs.ids:
            texts = ["" if part is None else part.text for part in (ours, theirs)]
            equal = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False))))
            ends = [text[equal : equal + 60] for text in texts]
            return {"turn": max(1, turn), "best": ends[0], "other": ends[1]}
    return None


def _parts(record: Mapping[str, Any]) -> Iterator[EpisodePart]:
    for segment in record["segments"]:
        yield EpisodePart("prompt", segment["prompt_ids"], str(segment["prompt"]))
        for run in segment["runs"]:
            yield EpisodePart("sampled" if run["mask"] else "fed", run["ids"], str(run["text"]))


@app.command()
def diff(run: RunName, episode: str, other: str, runs_dir: RunsDir = RUNS, *, as_json: AsJson = False) -> None:
    """Compare two episodes part by part: a line for what is equal, both texts of what differs.

    Example: penstock archive diff calculator train/0000/00000007#0 train/0000/00000007#3
    """
    with user_errors(BadPayload):
        pair = [record_of(run, runs_dir, name) for name in (episode, other)]
    parts = [_difference(ours, theirs) for ours, theirs in zip_longest(*map(_parts, pair))]
    if as_json:
        print(json.dumps({"episodes": [episode, other], "parts": parts}))
        return
    for sign, one in zip("-+", pair, strict=True):
        typer.secho(f"{sign} {one['episode_id']}  step {one['step']}  reward {one['reward']}", fg=COLOURS[sign])
    for part in parts:
        print(f"── {part['kind']}, {'equal' if part['equal'] else 'different'}")
        for sign, text in () if part["equal"] else zip("-+", part["texts"], strict=True):
            for line in (text or "").splitlines():
                typer.secho(f"{sign} {line}", fg=COLOURS[sign])


def _difference(ours: EpisodePart | None, theirs: EpisodePart | None) -> dict[str, Any]:
    """`texts`: None for an episode that has ended before this part."""
    both = [part for part in (ours, theirs) if part is not None]
    equal = len(both) == 2 and both[0].ids == both[1].ids
    return {"kind": both[0].kind, "equal": equal, "texts": [part and part.text for part in (ours, theirs)]}
