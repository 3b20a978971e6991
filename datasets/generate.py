"""`generate:SPEC` and `harbor:FOLDER` in a recipe's data section: rows made at the run's start.

generate:calculator/train?train=4096&eval=128&seed=0      problems, so that a run needs no files
harbor:tasks                                              the task folders of a folder, as they are
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import parse_qsl

from penstock.datasets import calculator
from penstock.datasets.harbor.rows import HARBOR, BadFolder, harbor_rows, write_harbor

PREFIX = "generate:"
DEFAULTS = {"train": 4096, "eval": 128, "seed": 0}


class BadSpec(ValueError):
    """The text after `generate:` names no generator, split or option that exists, that after `harbor:` no folder of
    tasks that can be used."""


def is_generated(source: str) -> bool:
    """Whether `source` is a text that `materialise` makes a file of."""
    return source.startswith((PREFIX, HARBOR))


def materialise(source: str, directory: Path) -> str:
    """The path to read for `source`: itself, or where it is generated a Parquet file made under `directory`.

    Train and eval are disjoint when their specs carry the same options. Raises `BadSpec`.
    """
    (path,) = materialise_all([source], directory)
    return path


def materialise_all(sources: Sequence[str], directory: Path) -> list[str]:
    """`materialise` of each; both splits of the same options are made once."""
    made: set[Path] = set()
    return [_made(source, directory, made) if is_generated(source) else source for source in sources]


def _made(source: str, directory: Path, made: set[Path]) -> str:
    if source.startswith(HARBOR):
        try:
            return str(write_harbor(source, directory))
        except BadFolder as error:
            raise BadSpec(str(error)) from error
    name, options = _parsed(source)
    folder = directory / "calculator-{train}-{eval}-{seed}".format(**options)
    if folder not in made:
        calculator.write_calculator(folder, options["train"], options["eval"], options["seed"])
        made.add(folder)
    return str(folder / f"{name.partition('/')[2]}.parquet")


def check_spec(source: str) -> None:
    """Raises `BadSpec` where `materialise` would."""
    if not source.startswith(HARBOR):
        _parsed(source)
        return
    try:
        harbor_rows(Path(source.removeprefix(HARBOR)).expanduser())
    except BadFolder as error:
        raise BadSpec(str(error)) from error


def _parsed(source: str) -> tuple[str, dict[str, int]]:
    name, _, query = source.removeprefix(PREFIX).partition("?")
    if name not in ("calculator/train", "calculator/eval"):
        raise BadSpec(f"{source!r}: generators are calculator/train and calculator/eval")
    return name, _options(source, query)


def _options(source: str, query: str) -> dict[str, int]:
    options = dict(DEFAULTS)
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key not in DEFAULTS or not value.isdecimal():
            raise BadSpec(f"{source!r}: {key}={value} is no option; write numbers for {', '.join(DEFAULTS)}")
        options[key] = int(value)
    return options
