"""Checks of the data: every row is valid, and every setting by data source names one that the data has."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.common import pattern_of
from penstock.datasets import HARBOR, BadSpec, check_spec, is_generated, materialise
from penstock.deploy.config import RunConfig
from penstock.deploy.preflight.check import Check, warning
from penstock.sandbox.harbor import tasks_of

if TYPE_CHECKING:
    from penstock.trainer import DatasetRow

BLIND = {"sglang"}
"""Engines of whose pixels it cannot be proven that they are the trainer's."""


def data_sources(config: RunConfig) -> set[str]:
    """Every data_source of the training data; none if it is generated for the run, or is not a dataset."""
    from penstock.trainer import DataError, load_rows

    if is_generated(config.data.train):
        return set()
    try:
        return {row.data_source for row in load_rows(config.data.train)}
    except DataError:
        return set()  # `check_data` says so


def first_rows(config: RunConfig, limit: int) -> list[DatasetRow]:
    """Return the first rows of the training data, generated if the recipe says so. Raises `DataError`, `BadSpec`."""
    from penstock.trainer import load_rows

    with tempfile.TemporaryDirectory(prefix="penstock-doctor-") as folder:
        return load_rows(materialise(config.data.train, Path(folder)), limit)


def rewards_of(config: RunConfig) -> set[str]:
    """Names of the rewards that its rows need. A source that has none is left out: `check_reward` says so."""
    from penstock.agent_loops import BY_SOURCE, LoadError
    from penstock.agent_loops.rewards import choice_for

    if config.agent.reward != BY_SOURCE:
        return {config.agent.reward}
    names = set()
    for source in data_sources(config):
        with contextlib.suppress(LoadError):
            names.add(choice_for(source, config.agent.rewards.sources).name)
    return names


def check_data(config: RunConfig) -> Check:
    """Every row of every file; what is wrong is named by file, row and column. Images need an engine that sees them."""
    from penstock.trainer import DataError, load_rows

    counts, ignored = [], list[str]()
    for spec in (config.data.train, config.data.eval):
        if spec is None:
            continue
        try:
            if is_generated(spec):
                check_spec(spec)
                if spec.startswith(HARBOR):
                    tasks = tasks_of(Path(spec.removeprefix(HARBOR)).expanduser())
                    counts.append(f"{len(tasks)} task{'s' * (len(tasks) != 1)} in {spec.removeprefix(HARBOR)}")
                    ignored += [f"task {task.name}: task.toml: {text}" for task in tasks for text in task.ignored]
                continue
            rows = load_rows(spec)
        except (DataError, BadSpec) as error:
            return Check("data", False, str(error), _fix(str(error)))
        if config.rollout.engine in BLIND and any(row.has_images for row in rows):
            detail = f"{spec} has images, of which rollout.engine={config.rollout.engine} makes its own pixels"
            return Check("data", False, detail, "set rollout.engine=vllm or hf")
        counts.append(f"{len(rows)} rows in {spec}")
    detail = "; ".join(counts) or "generated for the run"
    if ignored:
        return warning("data", f"{detail}; {'; '.join(ignored[:3])}", "correct the key, or leave it out")
    return Check("data", True, detail)


def _fix(problem: str) -> str:
    if "is missing; found" in problem:
        needed = "prompt, data_source and reward_model.ground_truth"
        return f"give every row {needed} (docs/guide/data.md): add or rename the column"
    if "did you mean harbor:" in problem:
        return f"set data.train=harbor:{problem.rpartition('harbor:')[2].rstrip('?')}"
    if problem.startswith(HARBOR) and ": task " in problem:
        return (
            "complete or correct the task's folder, or move it out; `penstock data check` proves the tasks of a folder"
        )
    if problem.startswith(HARBOR):
        return "give a task's folder or a folder of tasks; a relative path is of the recipe's folder or the current one"
    if ", row " in problem:
        return "correct the row, or leave it out; docs/guide/data.md describes the columns"
    return (
        "set data.train and data.eval to a Parquet or JSON lines file, generate:NAME or harbor:FOLDER;"
        " the first lines of a recipe that ships have the commands that make its files"
    )


def check_curriculum(config: RunConfig) -> Check | None:
    sources = data_sources(config)
    if config.data.curriculum is None or not sources:
        return None
    name = "data.curriculum"
    try:
        config.data.curriculum.check(sorted(sources))
    except ValueError as error:
        return Check(name, False, str(error), f"the data has {', '.join(sorted(sources))}: name these")
    weights = (f"{source} {config.data.curriculum.of_source(source):g}" for source in sorted(sources))
    return Check(name, True, ", ".join(weights))


def check_sources(config: RunConfig) -> Iterator[Check]:
    """`agent.sources` and `trainer.sources`: that each is of some task."""
    for section, names in (("agent.sources", config.agent.sources), ("trainer.sources", config.trainer.sources)):
        if names:
            # The data sources of generated data are not known before the run: nothing is refused then.
            sources = data_sources(config)
            unused = [
                name for name in names if sources and all(pattern_of(source, [name]) is None for source in sources)
            ]
            yield Check(
                section,
                not unused,
                f"no data_source {', '.join(unused)}" if unused else ", ".join(names),
                f"the data has {', '.join(sorted(sources))}: correct the name, or leave it out",
            )
