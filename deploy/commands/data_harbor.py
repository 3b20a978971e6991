"""`penstock data check` and `penstock data export`: tasks of Harbor proven, patches as SWE-bench's predictions."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.deploy.commands.shared import Overrides, show_progress, user_errors

if TYPE_CHECKING:
    from penstock.datasets.harbor import CheckedTask
    from penstock.deploy.config import RunConfig
    from penstock.sandbox import SandboxConfig
    from penstock.sandbox.harbor import HarborTask


def check(
    folder: Annotated[Path, typer.Argument(help="A task's folder, or a folder of tasks.", metavar="FOLDER")],
    overrides: Overrides = None,
    *,
    recipe: Annotated[
        Path | None, typer.Option(help="Check in the boxes of this recipe: its `sandbox`, and its `harbor` tools.")
    ] = None,
    backend: Annotated[
        str, typer.Option(help="Of all boxes, without a recipe: docker, or bwrap if no task has an image.")
    ] = "docker",
    image: Annotated[
        str, typer.Option(help="Image for tasks without an image or Dockerfile (backend docker).")
    ] = "penstock-box:base",
    only: Annotated[list[str] | None, typer.Option("--task", help="This task alone; may be repeated.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Tasks at once.")] = 2,
    build: Annotated[bool, typer.Option(help="Build images of Dockerfiles that are not there yet.")] = True,
    network: Annotated[str, typer.Option(help="Network of the image builds: default, none or host.")] = "default",
    record: Annotated[
        Path | None, typer.Option(help="Where results are kept; default: FOLDER.check.jsonl next to it.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Run what the record has, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per task instead of a table.")] = False,
) -> None:
    """Prove tasks of Harbor or Terminal-Bench: each one's own solution must earn 1, doing nothing less.

    Ends with status 1 where a task is unsound. A check that was stopped continues from there; a task whose files or
    boxes have changed is checked anew.

    Examples: penstock data check tasks --concurrency 4
    penstock data check tasks --recipe recipe.yaml sandbox.memory_mb=8192
    """
    with _harbor_errors():
        config = _config(recipe, overrides or [])
        check = _check(
            folder,
            _boxes(config, backend, image, concurrency),
            _passed(config),
            record=record or folder.absolute().with_name(f"{folder.absolute().name}.check.jsonl"),
            names=only or [],
            concurrency=concurrency,
            network=network if build else None,
            again=again,
        )
        verdicts = asyncio.run(check)
    for text in (f"task {one.task}: task.toml: {text}" for one in verdicts for text in one.ignored):
        typer.secho(text, fg="yellow", err=True)
    for line in map(_as_json, verdicts) if as_json else _table(verdicts):
        typer.echo(line)
    raise typer.Exit(0 if all(one.sound for one in verdicts) else 1)


def export(
    folder: Annotated[Path, typer.Argument(help="The folder that the tools' setting `predictions` names.")],
    out: Annotated[Path, typer.Option("--out", help="The file to write: JSON lines.")],
    model: Annotated[str, typer.Option(help="Its name in the predictions, model_name_or_path.")],
    sample: Annotated[int, typer.Option(min=0, help="Which one of several episodes of an instance.")] = 0,
) -> None:
    """Write the patches of graded episodes in SWE-bench's prediction format.

    Example: penstock data export predictions --model mine --out predictions.jsonl
    """
    from penstock.datasets.swe import export_predictions

    with _harbor_errors():
        written, missing = export_predictions(folder, out, model, sample)
    typer.echo(f"{out}: {written} predictions")
    if missing:
        typer.secho(f"without a sample {sample}: {', '.join(missing)}", fg="yellow", err=True)


async def _check(
    folder: Path,
    config: SandboxConfig,
    passed: dict[str, str],
    *,
    record: Path,
    names: Sequence[str],
    concurrency: int,
    network: str | None,
    again: bool,
) -> list[CheckedTask]:
    from penstock.datasets.harbor import Checker, select
    from penstock.deploy.run.connection import TOKEN_VARIABLE
    from penstock.sandbox import make_sandbox
    from penstock.sandbox.harbor import check_pids

    check_pids(config)
    folders = select(folder, names)
    sandbox = make_sandbox(config, "harbor-check", os.environ.get(TOKEN_VARIABLE), 3600.0)
    try:
        make_image = _Images(config.backend, network)
        boxes = config.model_dump_json(exclude={"max_boxes"})
        checker = Checker(
            sandbox, record, make_image, passed, boxes=boxes, concurrency=concurrency, report=show_progress
        )
        return await checker.check(folders, again=again)
    finally:
        await sandbox.close()


class _Images:
    """Builds what Dockerfiles describe, one image at a time, if this machine's engine makes the boxes."""

    def __init__(self, backend: str, network: str | None) -> None:
        """`network`: of builds; None: nothing is built."""
        self._backend, self._network = backend, network
        self._turn = asyncio.Lock()

    async def __call__(self, task: HarborTask) -> None:
        from penstock.sandbox.docker import build_image, has_image

        if task.build is None or task.image is None or self._network is None or self._backend == "bwrap":
            return
        async with self._turn:
            if await has_image(task.image):
                return
            show_progress(f"{task.name}: building {task.image} …")
            context = await asyncio.to_thread(task.build.packed)
            await build_image(task.image, context, task.build_timeout_s, self._network)


def _config(recipe: Path | None, overrides: Sequence[str]) -> RunConfig | None:
    """Raises `ConfigError`."""
    from penstock.deploy.config import load_config
    from penstock.deploy.recipe_tree import ConfigError

    if recipe is not None:
        return load_config(recipe, overrides)
    if overrides:
        raise ConfigError(f"{overrides[0]}: overrides a recipe, and none is named; add --recipe")
    return None


def _boxes(config: RunConfig | None, backend: str, image: str, concurrency: int) -> SandboxConfig:
    """Raises `ValidationError`."""
    from penstock.datasets.harbor import check_config

    if config is None:
        return check_config(backend, image, concurrency)
    return config.sandbox.model_copy(update={"max_boxes": concurrency})


def _passed(config: RunConfig | None) -> dict[str, str]:
    """Variables that the recipe's `harbor` tools let tasks read."""
    tools = config.tools if config is not None else []
    names = [name for tool in tools if tool.name == "harbor" for name in tool.settings.get("pass_env", ())]
    return {name: os.environ[name] for name in names if name in os.environ}


def _table(tasks: Sequence[CheckedTask]) -> list[str]:
    width = max(len(one.task) for one in tasks)
    head = f"{'task':{width}}  {'oracle':>8}  {'empty':>8}  {'seconds':>8}  verdict"
    lines = []
    for one in tasks:
        begin, verdict = f"{one.task:{width}}  {_figures(one)}  ", " ".join((one.problem or "sound").split())
        if sys.stdout.isatty():  # the verdict in a column of its own
            columns = max(len(begin) + 20, shutil.get_terminal_size().columns)
            indent = " " * len(begin)
            lines.append(textwrap.fill(begin + verdict, columns, subsequent_indent=indent, break_on_hyphens=False))
        else:
            lines.append(begin + verdict)
    sound = sum(one.sound for one in tasks)
    outputs = [line for one in tasks for line in _outputs(one)]
    return [head, *lines, *outputs, f"{sound} of {len(tasks)} tasks are sound"]


def _outputs(one: CheckedTask) -> Iterator[str]:
    """The last lines of what the agents of an unsound task and their tests wrote."""
    from penstock.sandbox.harbor import without_repeats

    for probe in one.probes.values():
        for name, text in (("solve.sh", probe.solution_output), ("its tests", probe.tests_output)):
            if text and not probe.right:
                yield f"{one.task}, {probe.agent}: the last output of {name}"
                yield from (f"    {line}" for line in without_repeats(text).splitlines()[-10:])


def _figures(one: CheckedTask) -> str:
    rewards = {name: probe.reward for name, probe in one.probes.items()}
    cells = ["-" if rewards.get(name) is None else f"{rewards[name]:g}" for name in ("oracle", "empty")]
    seconds = sum(probe.seconds for probe in one.probes.values())
    return "  ".join(f"{cell:>8}" for cell in [*cells, f"{seconds:.1f}"])


def _as_json(one: CheckedTask) -> str:
    probes = {name: asdict(probe) for name, probe in one.probes.items()}
    return json.dumps({"task": one.task, "sound": one.sound, "problem": one.problem, "probes": probes})


def _harbor_errors() -> AbstractContextManager[None]:
    from pydantic import ValidationError

    from penstock.datasets.swe import BadFile
    from penstock.sandbox import SandboxError
    from penstock.sandbox.harbor import HarborTaskError

    return user_errors(BadFile, HarborTaskError, OSError, SandboxError, ValidationError)
