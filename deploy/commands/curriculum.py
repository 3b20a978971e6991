"""`penstock curriculum`: which tasks a run draws how often, and other weights while it trains."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.deploy.commands.shared import RUNS, AsJson, RunName, RunsDir, folder_of_run, load_run, user_errors

if TYPE_CHECKING:
    from penstock.trainer import CurriculumWeights

PREFIX = "curriculum/"
COLUMNS = ("weight", "drawn", "pass_rate", "new", "learnable", "easy", "hard")


def curriculum(
    run: RunName,
    source: Annotated[
        list[str] | None, typer.Option(metavar="NAME=WEIGHT", help="How often a data source comes; may be repeated.")
    ] = None,
    pool: Annotated[
        list[str] | None,
        typer.Option(metavar="POOL=WEIGHT", help="How often rows of new, learnable, easy or hard come."),
    ] = None,
    runs_dir: RunsDir = RUNS,
    *,
    as_json: AsJson = False,
) -> None:
    """Show a run's curriculum by data source, and change its weights: the trainer takes them with its next tasks.

    Tasks that are in the queue already stay there. Weights that were given here hold for later lives of the run too.

    Examples: penstock curriculum mine
    penstock curriculum mine --source gsm8k=2 --source code=0.5 --pool easy=0
    """
    from rich.console import Console
    from rich.table import Table

    with user_errors(OSError, ValueError):
        state = _changed(folder_of_run(run, runs_dir), source or (), pool or ())
    if as_json:
        print(json.dumps(state))
        return
    if not state["sources"]:
        print("no step is trained yet; weights: " + json.dumps(state["weights"]))
        return
    table = Table("data source", *COLUMNS, box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name, numbers in state["sources"].items():
        table.add_row(name, *("" if column not in numbers else f"{numbers[column]:.4g}" for column in COLUMNS))
    console = Console(highlight=False)
    console.print(table)
    pools = {name: weight for name, weight in state["weights"].items() if name != "sources"}
    console.print("weights of rows: " + ", ".join(f"{name} {weight:g}" for name, weight in pools.items()))


def _changed(root: Path, sources: Sequence[str], pools: Sequence[str]) -> dict[str, Any]:
    """{"weights", "sources": data source → numbers of its newest step}.

    Raises `ConfigError`, `OSError`, `ValueError`.
    """
    from penstock.dashboard import newest_row
    from penstock.trainer import RowPool, write_weights

    weights = _weights_of(root)
    numbers_by_source = by_source(newest_row(root / "metrics.jsonl") or {})
    if sources or pools:
        tree = weights.model_dump()
        tree["sources"] |= dict(map(_parse_weight, sources))
        pool_weights = dict(map(_parse_weight, pools))
        if unknown := pool_weights.keys() - set(RowPool):
            raise ValueError(f"--pool {', '.join(unknown)}: a row is in one of {', '.join(RowPool)}")
        tree |= pool_weights
        weights = type(weights).model_validate(tree)
        if numbers_by_source:
            weights.check(list(numbers_by_source))
        write_weights(root, weights)
    for name, numbers in numbers_by_source.items():
        numbers["weight"] = weights.of_source(name)
    return {"weights": weights.model_dump(), "sources": numbers_by_source}


def _weights_of(root: Path) -> CurriculumWeights:
    """Returns the weights that were set while the run trained, otherwise the recipe's."""
    from penstock.deploy.config import RUN_FILE
    from penstock.deploy.recipe_tree import ConfigError
    from penstock.deploy.run_dir import no_such_run
    from penstock.trainer import WEIGHTS_FILE, read_weights

    if not (root / RUN_FILE).is_file():
        raise ConfigError(no_such_run(root.parent, root.name))
    if (root / WEIGHTS_FILE).is_file():
        return read_weights(root / WEIGHTS_FILE)
    config = load_run(root)
    if config.data.curriculum is None:
        raise ConfigError(f"run {root.name} has no curriculum: set data.curriculum in its recipe")
    return config.data.curriculum.weights


def _parse_weight(text: str) -> tuple[str, float]:
    name, _, weight = text.rpartition("=")
    try:
        return name, float(weight)
    except ValueError:
        raise ValueError(f"{text!r}: write NAME=WEIGHT, such as gsm8k=2") from None


def by_source(row: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Returns the numbers of a line of metrics.jsonl by data source."""
    numbers_by_source: dict[str, dict[str, float]] = {}
    for key, value in row.items():
        if key.startswith(PREFIX):
            source, _, name = key.removeprefix(PREFIX).rpartition("/")
            numbers_by_source.setdefault(source, {})[name] = value
    return numbers_by_source
