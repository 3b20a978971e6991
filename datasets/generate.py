"""Rows that a run makes at its start: `generate:SPEC`, `reasoning_gym:TASK`, `harbor:FOLDER`, `FILE.py:NAME` in `data`.

generate:calculator/train?train=4096&eval=128&seed=0     arithmetic
generate:seeds/train?train=4096&eval=128&seed=0          a seed per row, for environments that make the rest
reasoning_gym:chain_sum?size=1000&seed=0                 see `reasoning_gym`
harbor:tasks                                             the task folders of a folder, as they are
my_game.py:TASKS                                         see `python_tasks`
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import parse_qsl

from penstock.datasets import calculator, reasoning_gym
from penstock.datasets.python_tasks import names_python_tasks, python_rows, write_python_tasks
from penstock.datasets.rows import INSTRUCTION, BadSpec, Row, write_parquet
from penstock.sandbox.harbor import HarborTaskError, tasks_of

PREFIX = "generate:"
HARBOR = "harbor:"
DEFAULTS = {"train": 4096, "eval": 128, "seed": 0}


def is_generated(source: str) -> bool:
    """True if `source` names rows that are made, rather than a file."""
    return source.startswith((PREFIX, reasoning_gym.PREFIX, HARBOR)) or names_python_tasks(source)


def materialise(source: str, directory: Path) -> str:
    """The path to read for `source`: itself, or a Parquet file made under `directory` if it is generated.

    Train and eval are disjoint when their specs carry the same options. Raises `BadSpec`.
    """
    (path,) = materialise_all([source], directory)
    return path


def materialise_all(sources: Sequence[str], directory: Path) -> list[str]:
    """`materialise` of each; both splits of the same options are made once."""
    written: set[Path] = set()
    return [_materialise(source, directory, written) if is_generated(source) else source for source in sources]


def _materialise(source: str, directory: Path, written: set[Path]) -> str:
    if source.startswith(reasoning_gym.PREFIX):
        return str(reasoning_gym.write_tasks(source, directory))
    if source.startswith(HARBOR):
        return str(write_harbor(source, directory))
    if names_python_tasks(source):
        return str(write_python_tasks(source, directory))
    name, options = _parsed(source)
    kind, _, split = name.partition("/")
    folder = directory / (f"{kind}-" + "{train}-{eval}-{seed}".format(**options))
    if folder not in written:
        GENERATORS[kind](folder, options["train"], options["eval"], options["seed"])
        written.add(folder)
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


def harbor_rows(source: str) -> list[Row]:
    """A row per task of the folder, with the instruction alone as prompt: Harbor gives an agent no more.

    Raises `BadSpec`, which names every task that cannot be used.
    """
    try:
        tasks = tasks_of(Path(source.removeprefix(HARBOR)).expanduser())
    except HarborTaskError as error:
        raise BadSpec(f"{source}: {error}") from error
    return [
        {
            "data_source": "harbor",
            "prompt": [{"role": "user", "content": task.instruction}],
            "ability": "agent",
            "reward_model": {"style": "rule", "ground_truth": task.name},
            "extra_info": {"index": index, "instance_id": task.name, "harbor_task": str(task.folder)},
        }
        for index, task in enumerate(tasks)
    ]


def write_harbor(source: str, directory: Path) -> Path:
    """The Parquet file of `source`, made under `directory`. Raises `BadSpec`."""
    folder = Path(source.removeprefix(HARBOR)).expanduser().absolute()
    path = directory / f"harbor-{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}.parquet"
    write_parquet(harbor_rows(source), path)
    return path


GENERATORS: dict[str, Callable[[Path, int, int, int], dict[str, int]]] = {
    "calculator": calculator.write_calculator,
    "seeds": write_seeds,
}


def check_spec(source: str) -> None:
    """Raises `BadSpec` if `materialise` would, except for what only the package of a task knows."""
    if source.startswith(reasoning_gym.PREFIX):
        reasoning_gym.check_tasks(source)
    elif source.startswith(HARBOR):
        harbor_rows(source)
    elif names_python_tasks(source):
        python_rows(source)
    else:
        _parsed(source)


def _parsed(source: str) -> tuple[str, dict[str, int]]:
    name, _, query = source.removeprefix(PREFIX).partition("?")
    known = [f"{kind}/{split}" for kind in GENERATORS for split in ("train", "eval")]
    if name not in known:
        raise BadSpec(f"{source!r}: generators are {', '.join(known)}")
    options = dict(DEFAULTS)
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key not in DEFAULTS or not value.isdecimal():
            raise BadSpec(f"{source!r}: {key}={value} is not an option; write numbers for {', '.join(DEFAULTS)}")
        options[key] = int(value)
    return name, options
