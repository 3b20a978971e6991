"""`penstock init`: a small project that trains, made of what ships."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from penstock.deploy.commands.guard import guarded

README = "README.md"


def init(
    folder: Annotated[Path, typer.Argument(help="A new or empty folder.", metavar="FOLDER")],
    template: Annotated[
        str,
        typer.Option("--from", help="calculator, retool, search_r1, swe, harbor or openai; each is described above."),
    ] = "calculator",
) -> None:
    """Make a small project that trains at once: a recipe, the parts that are yours to change, a README of ten lines.

    calculator: a loop, a tool and a reward of your own; a small model learns to call the tool. Start here.

    retool: arithmetic with a Python sandbox, scripted policies that prove the environment, a cold start.

    search_r1: questions answered by searching a corpus with a search server of yours, after a cold start.

    swe: small Python packages broken one function at a time, hidden tests, a shell agent.

    harbor: task folders of Harbor or Terminal-Bench as they are, with tools or a coding agent; no Python.

    openai: any OpenAI client as the agent, recorded and trained; here one of the OpenAI Agents SDK.

    Every file is yours to change; README.md has the commands in order. All of them run on two CPU cores.

    Example: penstock init mine --from calculator && cd mine
    """
    guarded(lambda: _init(folder, template))


def _init(folder: Path, template: str) -> None:
    from penstock.deploy.shipped import write_project

    for name in write_project(folder, template):
        typer.echo(f"  {folder / name}")
    typer.echo(f"next: cd {shlex.quote(str(folder))}, then the commands of {README}:\n")
    typer.echo((folder / README).read_text(encoding="utf-8"))
