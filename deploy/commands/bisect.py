"""`penstock bisect`: the step and the episodes whose removal undoes a collapse."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.common import FileLock
from penstock.deploy.commands.shared import RUNS, AsJson, RunName, RunsDir, folder_of_run, load_run, refuse, user_errors
from penstock.deploy.config import RunConfig
from penstock.deploy.recipe_tree import ConfigError
from penstock.deploy.run_dir import RunDir

if TYPE_CHECKING:
    from penstock.deploy.bisection.cause import Cause
    from penstock.trainer import DatasetRow
    from penstock.transfer_queue import Archive

LONGEST_LIST = 20
"""Episodes that the report lists; --json has all."""


def bisect(
    run: RunName,
    *,
    below: Annotated[float, typer.Option(help="The metric has collapsed if it is below this.")],
    metric: Annotated[
        str, typer.Option(help="Of metrics.jsonl: reward, num_turns_mean or response_length_mean.")
    ] = "reward",
    first: Annotated[int, typer.Option("--from", min=0, help="Look for the fall from this step on.")] = 0,
    rows: Annotated[int, typer.Option(min=0, help="Tasks that judge a try; 0: all of the step that fell.")] = 64,
    samples: Annotated[
        int | None, typer.Option("--n", min=1, help="Episodes per task; default: the run's group_size.")
    ] = None,
    most: Annotated[int, typer.Option("--tries", min=3, help="Most replays, each with an evaluation.")] = 40,
    runs_dir: RunsDir = RUNS,
    as_json: AsJson = False,
) -> None:
    """Find the step and the episodes of a run whose removal undoes a collapse.

    The run's records say at which step the metric fell below the bound. The steps before it are replayed from a healthy
    checkpoint with parts of them left out; the weights of each try play the tasks of that step with the run's own
    servers, loop, tools and reward. Each try takes a replay of the stretch and an evaluation. Interrupted or killed,
    the same command continues: tries are kept in runs/NAME/bisects. The run itself is not changed.

    Examples: penstock bisect calculator --below 0.5
    penstock bisect calculator --metric response_length_mean --below 10 --from 20 --n 4 --json
    """
    from penstock.deploy.bisection.cause import cause_of
    from penstock.deploy.bisection.collapse import fall_of, recorded_metric, stretches_of
    from penstock.deploy.bisection.tries import Judgement, Tries
    from penstock.deploy.run.connection import archive_of
    from penstock.deploy.run.console import HeadConsole

    with bisect_errors():
        root = folder_of_run(run, runs_dir).resolve()
        config, console, values = load_run(root), HeadConsole(), recorded_metric(RunDir(root), metric)
        archive, fall = archive_of(config), fall_of(values, below, first)
        falls = (f"{values[step]:.4g} at step {step}" for step in (fall.steps[0], fall.healthy))
        console.print(f"{root.name}: {metric} is {', '.join(falls)}", markup=False, soft_wrap=True)
        temperature = config.agent.temperature
        count = samples or (config.group_size if temperature else 1)
        tasks = tasks_of(config, archive, fall.steps[0])[: rows or None]
        judgement = Judgement(metric, below, tasks, count, temperature)
        folder = root / "bisects"
        folder.mkdir(exist_ok=True)
        with FileLock(folder / "lock", "another bisect of this run is running", error=ConfigError):
            tries = Tries(root, folder, most, judgement, console)
            cause = cause_of(tries, stretches_of(RunDir(root), archive, fall), archive)
    report = {"run": root.name, "metric": metric, "below": below, **cause.as_json()}
    typer.echo(json.dumps(report) if as_json else in_words(cause, metric, below))


@contextmanager
def bisect_errors() -> Iterator[None]:
    """Ends the command with status 2 for what is refused, 1 for what failed, 130 if it is interrupted."""
    from penstock.common import UnknownName
    from penstock.deploy.run.connection import RedisLost
    from penstock.deploy.run.launcher import Interrupted
    from penstock.deploy.run.processes import RoleFailed
    from penstock.deploy.run.supervisor import StalledRun
    from penstock.trainer import BadJob, DataError
    from penstock.transfer_queue import BadPayload, QueueError

    try:
        with user_errors(BadJob, BadPayload, DataError, UnknownName):
            yield
    except (RoleFailed, StalledRun, RedisLost, QueueError) as error:
        refuse(f"{error}\nthe same command continues it", 1)
    except (Interrupted, KeyboardInterrupt, asyncio.CancelledError):
        refuse("interrupted; the same command continues it", 130)


def tasks_of(config: RunConfig, archive: Archive, step: int) -> list[DatasetRow]:
    """Return the rows of the tasks of a step's batch. Raises `BadPayload`, `DataError`."""
    from penstock.trainer import DatasetRow, tasks_again

    names = dict.fromkeys(one.rpartition("#")[0] for group in archive.batches(step, step + 1)[step] for one in group)
    return [
        DatasetRow(task.messages, task.data_source, task.ground_truth, task.agent_name, task.extra_info)
        for task in tasks_again(config.data, config.seed, names).values()
    ]


def in_words(cause: Cause, metric: str, below: float) -> str:
    """The report for a terminal."""
    from penstock.deploy.bisection.cause import steps_in_words

    version, steps, episodes = cause.stretch.end, cause.steps, cause.episodes
    lines = [
        f"{steps_in_words(steps.items)}: the weights of version {version} have "
        f"{cause.with_all.in_words(metric, below)}; without it {cause.without_steps.in_words(metric, below)}",
        f"{len(episodes.items)} of its {cause.of_episodes} episodes are enough: without them "
        f"{cause.without_episodes.in_words(metric, below)}",
        *(f"  {one.episode}  step {one.step}  reward {one.reward:.6g}" for one in episodes.items[:LONGEST_LIST]),
    ]
    if len(episodes.items) > LONGEST_LIST:
        lines.append(f"  and {len(episodes.items) - LONGEST_LIST} more; --json has all")
    lines += _not_separated("steps", len(steps.items), steps.is_minimal)
    lines += _not_separated("episodes", len(episodes.items), episodes.is_minimal)
    lines.append(
        f"{cause.tries} tries; {cause.undecided} could not be trained, {cause.close} have {below:g} in their interval"
    )
    return "\n".join(lines)


def _not_separated(what: str, count: int, is_minimal: bool) -> Sequence[str]:
    if not is_minimal:
        return [f"the tries are used up: not all of the {count} {what} may be needed; --tries allows more"]
    return [f"the {count} {what} were not separated: without any fewer of them it stays below"] if count > 1 else []
