"""Rows that a run makes at its start: `generate:SPEC`, `reasoning_gym:TASK` and `harbor:FOLDER` in `data`.

generate:calculator/train?train=4096&eval=128&seed=0     arithmetic
generate:seeds/train?train=4096&eval=128&seed=0          a seed per row, for environments that make the rest
reasoning_gym:chain_sum?size=1000&seed=0                 see `reasoning_gym`
harbor:tasks                                             the task folders of a folder, as they are
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import parse_qsl

from penstock.datasets import calculator, reasoning_gym
from penstock.datasets.harbor.rows import HARBOR, BadFolder, harbor_rows, write_harbor
from penstock.datasets.rows import write_parquet

PREFIX = "generate:"
DEFAULTS = {"train": 4096, "eval": 128, "seed": 0}
INSTRUCTION = "You act in an environment. Each message tells what you observe; each of your answers is one action."


class BadSpec(ValueError):
    """The source names no generator, split, task, folder or option that exists."""


def is_generated(source: str) -> bool:
    """Whether `source` names rows that are made, rather than a file."""
    return source.startswith((PREFIX, reasoning_gym.PREFIX, HARBOR))


def materialise(source: str, directory: Path) -> str:
    """The path to read for `source`: itself, or a Parquet file made under `directory` where it is generated.

    Train and eval are disjoint when their specs carry the same options. Raises `BadSpec`.
    """
    (path,) = materialise_all([source], directory)
    return path


def materialise_all(sources: Sequence[str], directory: Path) -> list[str]:
    """`materialise` of each; both splits of the same options are made once."""
    made: set[Path] = set()
    return [_made(source, directory, made) if is_generated(source) else source for source in sources]


def _made(source: str, directory: Path, made: set[Path]) -> str:
    try:
        if source.startswith(reasoning_gym.PREFIX):
            return str(reasoning_gym.write_tasks(source, directory))
        if source.startswith(HARBOR):
            return str(write_harbor(source, directory))
    except (reasoning_gym.BadTasks, BadFolder) as error:
        raise BadSpec(str(error)) from error
    name, options = _parsed(source)
    kind, _, split = name.partition("/")
    folder = directory / (f"{kind}-" + "{train}-{eval}-{seed}".format(**options))
    if folder not in made:
        GENERATORS[kind](folder, options["train"], options["eval"], options["seed"])
        made.add(folder)
    return str(folder / f"{split}.parquet")


def write_seeds(folder: Path, train: int, evaluation: int, seed: int) -> dict[str, int]:
    """Rows of nothing but a seed, counted from `seed`: those of eval follow those of train."""
    counts = {"train": train, "eval": evaluation}
    folder.mkdir(parents=True, exist_ok=True)
    for split, first in (("train", seed), ("eval", seed + train)):
        rows = [
            {
                "data_source": "seeds",
                "prompt": [{"role": "system", "content": INSTRUCTION}],
                "reward_model": {"style": "rule", "ground_truth": "environment"},
                "extra_info": {"split": split, "index": index, "seed": first + index},
            }
            for index in range(counts[split])
        ]
        write_parquet(rows, folder / f"{split}.parquet")
    return counts


GENERATORS: dict[str, Callable[[Path, int, int, int], dict[str, int]]] = {
    "calculator": calculator.write_calculator,
    "seeds": write_seeds,
}


def check_spec(source: str) -> None:
    """Raises `BadSpec` where `materialise` would, but for what only the package of a task knows."""
    try:
        if source.startswith(reasoning_gym.PREFIX):
            reasoning_gym.check_tasks(source)
        elif source.startswith(HARBOR):
            harbor_rows(Path(source.removeprefix(HARBOR)).expanduser())
        else:
            _parsed(source)
    except (reasoning_gym.BadTasks, BadFolder) as error:
        raise BadSpec(str(error)) from error


def _parsed(source: str) -> tuple[str, dict[str, int]]:
    name, _, query = source.removeprefix(PREFIX).partition("?")
    known = [f"{kind}/{split}" for kind in GENERATORS for split in ("train", "eval")]
    if name not in known:
        raise BadSpec(f"{source!r}: generators are {', '.join(known)}")
    options = dict(DEFAULTS)
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key not in DEFAULTS or not value.isdecimal():
            raise BadSpec(f"{source!r}: {key}={value} is no option; write numbers for {', '.join(DEFAULTS)}")
        options[key] = int(value)
    return name, options
