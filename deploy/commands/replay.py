"""`penstock replay`: train a stretch of a run again from its checkpoint and its archive."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from penstock.deploy.commands.shared import RunName, RunsDir, folder_of_run, user_errors
from penstock.deploy.config import RUN_FILE, ConfigError, RunConfig, load_config

if TYPE_CHECKING:
    from penstock.trainer import TrainJob

ORDER = "order.json"
"""Name of the file in a replay's folder that tells its ranks what to train."""


def replay(
    run: RunName,
    *,
    first: Annotated[
        int, typer.Option("--from", min=0, help="A checkpoint's step; 0: the model that the run began with.")
    ],
    last: Annotated[
        int | None, typer.Option("--to", help="The step after the last one; default: all of the index.")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="trainer.key=value: another algorithm for the same batches.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A new folder; default: replays/FROM-TO in the run's.")] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Train steps of a run again without rollout servers: the same weights bit for bit, or another algorithm's.

    Each step says whether its metrics are the run's, and how far off-policy its batch is.

    Examples: penstock replay calculator --from 0
    penstock replay calculator --from 0 --to 20 --set trainer.loss=gspo
    """
    from penstock.deploy.run.connection import archive_of
    from penstock.transfer_queue import BadPayload

    with user_errors(BadPayload):
        root = folder_of_run(run, runs_dir).resolve()
        config = load_config(root / RUN_FILE, checked(changes or []), with_tasks=False)
        steps = archive_of(config).index()["step"].to_pylist() if last is None else [last - 1]
        if not steps:
            raise ConfigError(f"{root.name}: its archive has no committed step; --to replays trained ones")
        end = steps[-1] + 1
        folder = out or next_folder(root / "replays", f"{first}-{end}")
        if folder.exists():
            raise ConfigError(f"--out {folder}: it is there already; name a new folder")
        folder.mkdir(parents=True)
        order = {"run": str(root), "first": first, "last": end, "changes": changes or []}
        (folder / ORDER).write_text(json.dumps(order) + "\n")
        print(f"the replay's folder is {folder}", flush=True)
        _become_ranks(config, folder.resolve())


def checked(changes: Sequence[str]) -> Sequence[str]:
    """Raises `ConfigError` for a setting that the archived batches were made with."""
    for change in changes:
        if not change.startswith("trainer."):
            raise ConfigError(f"--set {change}: only trainer.* can be changed; the batches were made with the others")
    return changes


def next_folder(parent: Path, name: str) -> Path:
    """A folder that is not there yet."""
    names = (parent / f"{name}{suffix}" for suffix in ("", *map(".{}".format, range(2, 10_000))))
    return next(folder for folder in names if not folder.exists())


def _become_ranks(config: RunConfig, folder: Path) -> None:
    """Replace this process by the ranks, in the environment that the trainer's have."""
    from penstock.deploy.commands.train import python_of
    from penstock.deploy.sft.rank import exec_ranks

    python, words = python_of(config.trainer), ["replay-rank", str(folder)]
    os.environ["OMP_NUM_THREADS"] = str(config.trainer.threads or 1)
    if config.trainer.ranks == 1:
        os.execv(python, [python, "-m", "penstock.deploy.cli", *words, "--alone"])  # noqa: S606
    exec_ranks(folder, config, words, python)


async def replay_rank(folder: Path) -> None:
    """One rank of a replay in its folder."""
    from penstock.common import UnknownName, uncollected
    from penstock.deploy.run.connection import archive_of
    from penstock.deploy.run.roles import fatal

    with uncollected():
        from penstock.trainer import (
            BadJob,
            NotSaved,
            PayloadsLost,
            ReplayJob,
            TooFarOffPolicy,
            TrainingDiverged,
            replay_steps,
        )
        from penstock.transfer_queue import BadPayload

    order = json.loads((folder / ORDER).read_text())
    file = Path(order["run"]) / RUN_FILE
    before = load_config(file, with_tasks=False)
    config = load_config(file, order["changes"], with_tasks=False)
    jobs = _job_of(config, folder), _job_of(before, Path(order["run"]))
    with fatal(BadJob, BadPayload, NotSaved, PayloadsLost, TooFarOffPolicy, TrainingDiverged, UnknownName):
        result = await replay_steps(ReplayJob(*jobs, archive_of(before), order["first"], order["last"]))
    if os.environ.get("RANK", "0") == "0":
        print(in_words(result), file=sys.stdout)


def _job_of(config: RunConfig, folder: Path) -> TrainJob:
    from penstock.deploy.run.connection import RunConnection
    from penstock.deploy.run.roles import context_of, train_job
    from penstock.transfer_queue import TransferQueue

    # A replay reads the archive in place of a queue, and publishes nothing.
    no_queue = RunConnection("", config.name, None, "a replay has no token")
    return train_job(context_of(no_queue, cast(TransferQueue, None), config), config, folder)


def in_words(result: dict[str, Any]) -> str:
    steps = result["last"] - result["first"]
    policy = (
        f"the effective sample share was at least {result['effective_sample_share_min']:.3f}, the share of clipped "
        f"tokens at most {result['clip_share_max']:.3f}"
    )
    if result["changed"]:
        return f"{steps} steps trained with another algorithm: {policy}"
    same = f"{result['steps_equal']} of {steps} steps have the run's metrics to the last bit"
    weights = {
        True: "the weights equal the run's, bit for bit",
        False: "the weights DIFFER from the run's",
        None: "the run has no checkpoint after the last step to compare the weights with",
    }
    return f"{same}; {weights[result['weights_equal']]}; {policy}"
