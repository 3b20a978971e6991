"""`penstock data swe-mutations | swe-check | swe-bench | swe-gym | r2e`: repositories to repair."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.deploy.commands.shared import refuse, show_progress, user_errors

if TYPE_CHECKING:
    from penstock.datasets.swe import Format
    from penstock.sandbox import Sandbox

Backend = Annotated[str, typer.Option(help="Where tests run: bwrap or docker.")]
BoxImage = Annotated[str, typer.Option("--image", help="Backend docker: image of the boxes.")]
Input = Annotated[Path, typer.Option("--input", help="A .parquet, .jsonl or .json file, or a folder of them.")]
Out = Annotated[Path, typer.Option("--out", help="Folder for SPLIT.parquet (to train on) and SPLIT.jsonl.")]
Split = Annotated[str, typer.Option(help="Name of the files that are written.")]
Image = Annotated[str, typer.Option(help="Name of a row's own image, with {id}; see recipes/swe/build-images.")]
Repositories = Annotated[
    Path | None, typer.Option(help="Folder of clones, owner__name: boxes are filled from these, and need no images.")
]
TestCommand = Annotated[str, typer.Option(help="Instead of the dataset's: PYTHON -m pytest …, or any with {test}.")]


def swe_mutations(  # noqa: PLR0917 - options of a command
    package: Annotated[
        list[str], typer.Option("--package", help="A folder, or an installed package; may be repeated.")
    ],
    out: Out,
    tests: Annotated[
        list[Path] | None,
        typer.Option("--tests", help="Folder of tests for the package at the same place, if it has none."),
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Tasks wanted of each package.")] = 20,
    evaluation: Annotated[int, typer.Option("--eval", min=0, help="How many of these go to test.parquet.")] = 0,
    seed: Annotated[int, typer.Option(help="The same seed and sources make the same tasks.")] = 0,
    per_function: Annotated[int, typer.Option(min=1, help="Most tasks made from one function.")] = 3,
    concurrency: Annotated[int, typer.Option(min=1, help="Boxes at once; the tasks do not hang on it.")] = 2,
    backend: Backend = "bwrap",
    image: BoxImage = "penstock-box:base",
) -> None:
    """Break the functions of small packages, one at a time, and keep what their tests notice.

    Each task is proven before it is written: its reference patch passes, no patch fails.

    Example: penstock data swe-mutations --package mdurl --tests recipes/swe/package_tests/mdurl --out data/swe
    """
    from penstock.datasets.swe import FactorySettings, MutationRequest, make_tasks

    folders = tests or []
    if len(folders) > len(package):
        refuse(f"{len(folders)} times --tests for {len(package)} times --package")
    request = MutationRequest(tuple(package), tuple(folders), evaluation)
    settings = FactorySettings(count=count, seed=seed, per_function=per_function, concurrency=concurrency)
    with _swe_errors():
        sandbox = _sandbox(backend, image, concurrency)
        for line in asyncio.run(make_tasks(request, out, sandbox, settings, show_progress)):
            typer.echo(line)


def swe_check(
    tasks: Annotated[Path, typer.Option("--tasks", help="SPLIT.jsonl as the other commands write it.")],
    times: Annotated[int, typer.Option(min=1, help="Gradings of each; more find tests that end now so, now so.")] = 1,
    limit: Annotated[int, typer.Option(min=0, help="The first tasks only; 0: all.")] = 0,
    backend: Backend = "bwrap",
    image: BoxImage = "penstock-box:base",
) -> None:
    """Grade each task's reference patch, and no patch; say what is wrong with a task. Status 1 where one is unsound."""
    from penstock.datasets.swe import check_tasks

    with _swe_errors():
        problems = asyncio.run(check_tasks(tasks, _sandbox(backend, image, 1), times, limit, show_progress))
    for line in problems:
        typer.secho(line, fg="red", err=True)
    raise typer.Exit(1 if problems else 0)


def swe_bench(  # noqa: PLR0917 - options of a command
    source: Input,
    out: Out,
    split: Split = "train",
    image: Image = "penstock-swe:{id}",
    repositories: Repositories = None,
    test_command: TestCommand = "",
) -> None:
    """SWE-bench (full, Lite, Verified) and datasets of its shape.

    Example: penstock data swe-bench --input swe-bench-verified.parquet --out data/swe-bench
    """
    _convert("swe-bench", source, out, split, image, repositories, test_command)


def swe_gym(  # noqa: PLR0917 - options of a command
    source: Input,
    out: Out,
    split: Split = "train",
    image: Image = "penstock-swe:{id}",
    repositories: Repositories = None,
    test_command: TestCommand = "",
) -> None:
    """SWE-Gym: SWE-bench's fields, its own images."""
    _convert("swe-gym", source, out, split, image, repositories, test_command)


def r2e(source: Input, out: Out, split: Split = "train", image: Image = "penstock-swe:{id}") -> None:
    """R2E-Gym (full, Lite, Subset): hidden tests and reference patch from its rows, repositories from its images."""
    _convert("r2e", source, out, split, image, None, "")


def _convert(  # noqa: PLR0917 - the options as they come
    kind: Format, source: Path, out: Path, split: str, image: str, repositories: Path | None, test_command: str
) -> None:
    from penstock.datasets.swe import Places, convert

    with _swe_errors():
        done = convert(kind, source, out, Places(image, repositories, test_command), split)
    for line in done.refused[:20]:
        typer.secho(line, fg="yellow", err=True)
    typer.echo(f"{out / f'{split}.parquet'}: {done.written} tasks, {len(done.refused)} rows left out")


def _sandbox(backend: str, image: str, concurrency: int) -> Sandbox:
    from penstock.datasets.swe import box_config
    from penstock.sandbox import make_sandbox

    return make_sandbox(box_config(backend, image, concurrency), "swe-data")


def _swe_errors() -> AbstractContextManager[None]:
    from pydantic import ValidationError

    from penstock.datasets.swe import BadFile, GitFailed, NoPytest, PackageError
    from penstock.sandbox import SandboxError
    from penstock.sandbox.swe import SweTaskError

    data_errors = (BadFile, GitFailed, NoPytest, PackageError, ValidationError)
    return user_errors(*data_errors, OSError, SandboxError, SweTaskError)
