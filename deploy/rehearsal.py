"""A recipe's tasks, played by a scripted policy in the model's place; see `penstock.testing.check_env`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.datasets import BadSpec, materialise
from penstock.deploy.config import RunConfig
from penstock.deploy.recipe_tree import ConfigError
from penstock.deploy.run.connection import TOKEN_VARIABLE
from penstock.testing import SPLIT, EnvCheck, Policy, check_env
from penstock.trainer import DataError, DatasetRow, load_rows


def rows_of(config: RunConfig, split: str, limit: int = 0) -> list[DatasetRow]:
    """The first `limit` rows (0: all) of split ``train`` or ``eval``. Raises `DataError`, `ConfigError`."""
    sources = {name: path for name, path in (("train", config.data.train), ("eval", config.data.eval)) if path}
    if split not in sources:
        unset = "data.eval is not set (EVAL_TASKS of a Python file): set it, or use"
        part = unset if split == "eval" else f"--split {split}: use"
        raise ConfigError(f"{part} --split {' or '.join(sources)}")
    with tempfile.TemporaryDirectory() as folder:
        try:
            return load_rows(materialise(sources[split], Path(folder)), limit)
        except BadSpec as error:
            raise ConfigError(f"data: {error}") from error


def full_reward(row: DatasetRow) -> float:
    """Return the reward of a fully correct answer: `extra_info.full_reward` of the row, else 1.

    Raises `DataError` if that is not a number.
    """
    reward = row.extra_info.get("full_reward", 1.0)
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise DataError(f"extra_info.full_reward must be a number, found {reward!r}: it is what a right answer earns")
    return float(reward)


async def rehearse_recipe(
    config: RunConfig, policy: Policy, rows: Sequence[DatasetRow], on_ended: Callable[[int], None] = lambda _: None
) -> EnvCheck:
    """With the recipe's loop, tools, sandbox and reward. Raises as `check_env` does."""
    return await check_env(
        [row.task(str(number), SPLIT) for number, row in enumerate(rows)],
        policy,
        model=config.model,
        config=config.agent,
        tools=config.tools,
        sandbox=config.sandbox,
        sandbox_token=os.environ.get(TOKEN_VARIABLE),
        recipe_dir=Path.cwd(),
        on_ended=on_ended,
    )
