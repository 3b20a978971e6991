"""`penstock replay`: train a stretch of a run again from its checkpoint and its archive."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from penstock.common import die_with_parent
from penstock.deploy.commands.shared import RUNS, RunName, RunsDir, folder_of_run, load_run, user_errors
from penstock.deploy.config import RunConfig
from penstock.deploy.recipe_tree import ConfigError
from penstock.deploy.run_dir import RunDir

if TYPE_CHECKING:
    from penstock.trainer import ReplayJob, TrainJob
    from penstock.transfer_queue import Archive

ORDER = "order.json"
"""Name of the file in a replay's folder that tells its ranks what to train."""
First = Annotated[int, typer.Option("--from", min=0, help="A checkpoint's step; 0: the model that the run began with.")]
Last = Annotated[int | None, typer.Option("--to", help="The step after the last one; default: all of the index.")]


def replay(
    run: RunName,
    *,
    first: First,
    last: Last = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="trainer.key=value: another algorithm for the same batches.")
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(help="Not trained: a step, or an episode as `penstock archive ls --by episode` lists it."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A new folder; default: replays/FROM-TO in the run's.")] = None,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Train steps of a run again without rollout servers: the same weights bit for bit, or those of another algorithm
    or of fewer episodes.

    Each step says whether its metrics are the run's, and how far off-policy its batch is. Status 1 where a step or the
    weights differ from the run's, or a batch cannot be corrected.

    Examples: penstock replay calculator --from 0
    penstock replay calculator --from 0 --to 20 --set trainer.loss=gspo
    penstock replay calculator --from 10 --to 20 --without 12 --without train/0000/00000104#3
    """
    from penstock.trainer import check_replay

    with replay_errors():
        root = folder_of_run(run, runs_dir).resolve()
        job = new_replay(root, first, last, checked(changes or [], "trainer"), out or root / "replays")
        job = replace(job, left_out=episodes_named(job.archive, job.first, job.last, without or []))
        check_replay(job)
        start_replay(job, changes or [])


def replay_errors() -> AbstractContextManager[None]:
    """Ends the command with status 2 and the message of what is refused before anything is trained."""
    from penstock.common import UnknownName
    from penstock.trainer import BadJob
    from penstock.transfer_queue import BadPayload

    return user_errors(BadJob, BadPayload, UnknownName)


def new_replay(
    root: Path, first: int, last: int | None, changes: Sequence[str], folder: Path, *, has_new_rewards: bool = False
) -> ReplayJob:
    """Return a checked replay whose folder is not there yet: `folder`, or below it one named by the steps. Raises
    what `replay_errors` handles."""
    from penstock.deploy.run.connection import archive_of
    from penstock.trainer import ReplayJob, check_replay

    archive = archive_of(load_run(root))
    steps = archive.index()["step"].to_pylist() if last is None else [last - 1]
    if not steps:
        raise ConfigError(f"{root.name}: its archive has no committed step; --to replays trained ones")
    if folder.parent == root:
        folder = next_folder(folder, f"{first}-{steps[-1] + 1}")
    if folder.exists():
        raise ConfigError(f"--out {folder}: it is there already; name a new folder")
    jobs = _jobs_of(root, folder.resolve(), changes)
    job = ReplayJob(*jobs, archive, first, steps[-1] + 1, has_new_rewards)
    check_replay(job)
    return job


def start_replay(job: ReplayJob, changes: Sequence[str]) -> None:
    """Make the folder and replace this process by the ranks, in the environment that the trainer's have."""
    from penstock.deploy.commands.train import python_of
    from penstock.deploy.run.plan import rank_environment
    from penstock.deploy.sft.rank import exec_ranks

    if os.environ.get("PENSTOCK_SUPERVISED"):
        die_with_parent()  # kept over exec
    folder, root = job.job.run_dir, job.of_run.run_dir
    folder.mkdir(parents=True, exist_ok=True)
    order = {"run": str(root), "steps": [job.first, job.last], "changes": changes, "rescored": job.has_new_rewards}
    order["left_out"] = sorted(job.left_out)
    (folder / ORDER).write_text(json.dumps(order) + "\n")
    print(f"the replay's folder is {folder}", flush=True)
    config = load_run(root, changes)
    python, words = python_of(config.trainer), ["replay-rank", str(folder)]
    os.environ.update(rank_environment(config.trainer))
    if config.trainer.ranks == 1:
        os.execv(python, [python, "-m", "penstock.deploy.cli", *words, "--alone"])  # noqa: S606
    exec_ranks(folder, config, words, python)


def episodes_named(archive: Archive, first: int, last: int, names: Sequence[str]) -> frozenset[str]:
    """Return the episodes of steps `first` to before `last` that are named themselves or by their step. Raises
    `ConfigError`, `BadPayload`."""
    by_name: dict[str, list[str]] = {}
    for step, groups in archive.batches(first, last).items():
        episodes = [one for group in groups for one in group]
        by_name |= {str(step): episodes, **{one: [one] for one in episodes}}
    if unknown := [name for name in names if name not in by_name]:
        raise ConfigError(
            f"--without {unknown[0]}: no step from {first} to {last - 1} and no episode of them; "
            "`penstock archive ls RUN --by episode` lists them"
        )
    return frozenset(one for name in names for one in by_name[name])


def checked(changes: Sequence[str], *sections: str) -> Sequence[str]:
    """Raises `ConfigError` for a setting outside of `sections`: the archived batches were made with it."""
    for change in changes:
        if not change.startswith(tuple(f"{section}." for section in sections)):
            keys = " and ".join(f"{section}.*" for section in sections)
            raise ConfigError(f"--set {change}: only {keys} can be changed; the batches were made with the others")
    return changes


def next_folder(parent: Path, name: str) -> Path:
    """A folder that is not there yet."""
    names = (parent / f"{name}{suffix}" for suffix in ("", *map(".{}".format, range(2, 10_000))))
    return next(folder for folder in names if not folder.exists())


async def replay_rank(folder: Path) -> None:
    """One rank of a replay in its folder. Raises `FatalError` where the result is not the run's, or not whole."""
    from penstock.common import UnknownName, uncollected
    from penstock.deploy.run.connection import archive_of
    from penstock.deploy.run.roles import FatalError, fatal

    with uncollected():
        from penstock.trainer import BadJob, NotSaved, PayloadsLost, ReplayJob, TrainingDiverged, replay_steps
        from penstock.transfer_queue import Archive, BadPayload

    order = json.loads((folder / ORDER).read_text())
    root, is_rescored = Path(order["run"]), order["rescored"]
    own = Archive(RunDir(folder).archive) if is_rescored else archive_of(load_run(root))
    with fatal(BadJob, BadPayload, NotSaved, PayloadsLost, TrainingDiverged, UnknownName):
        jobs, (first, last) = _jobs_of(root, folder, order["changes"]), order["steps"]
        result = await replay_steps(ReplayJob(*jobs, own, first, last, is_rescored, frozenset(order["left_out"])))
    if os.environ.get("RANK", "0") == "0":
        print(in_words(result), file=sys.stdout, flush=True)
    if result["steps_different"] or result["weights_equal"] is False:
        raise FatalError("the replay is not the run")
    if result["refused"] and (result["last"] == result["first"] or not is_rescored):
        raise FatalError(result["refused"])


def _jobs_of(root: Path, folder: Path, changes: Sequence[str]) -> tuple[TrainJob, TrainJob]:
    """Return the jobs of the replay and of its run."""
    return _job_of(load_run(root, changes), folder), _job_of(load_run(root), root)


def _job_of(config: RunConfig, folder: Path) -> TrainJob:
    from penstock.deploy.run.connection import RunConnection
    from penstock.deploy.run.roles import context_of, train_job
    from penstock.transfer_queue import TransferQueue

    # A replay reads the archive in place of a queue, and publishes nothing.
    no_queue = RunConnection("", config.name, None, "a replay has no token")
    return train_job(context_of(no_queue, cast(TransferQueue, None), config), config, folder)


def in_words(result: dict[str, Any]) -> str:
    steps = result["steps_trained"]
    if not steps:
        return f"no step is trained: {result['refused'] or 'all episodes are left out'}"
    policy = (
        f"the effective sample share was at least {result['effective_sample_share_min']:.3f}, the share of clipped "
        f"tokens at most {result['clip_share_max']:.3f}"
    )
    if result["changed"]:
        refused = f". It ends here: {result['refused']}" if result["refused"] else ""
        change = f"without {result['left_out']} episodes" if result["left_out"] else "with another algorithm or rewards"
        return f"{steps} steps trained {change}: {policy}{refused}"
    same = f"{result['steps_equal']} of {steps} steps have the run's metrics to the last bit"
    weights = {
        True: "the weights equal the run's, bit for bit",
        False: "the weights DIFFER from the run's",
        None: "the run has no checkpoint after the last step to compare the weights with",
    }
    return f"{same}; {weights[result['weights_equal']]}; {policy}"
