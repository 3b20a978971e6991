"""`penstock train replay`: a batch whose loss or gradient was not finite, computed again."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from penstock.trainer import Replayed

MOST_CAUSES = 12


def replay(dump: Annotated[Path, typer.Argument(help="A folder in runs/NAME/bad_batches.")]) -> None:
    """Compute a kept batch again in one process: same loss, same gradient norm, and what is not finite first.

    Ends with 0 where both numbers are the recorded ones, else with 1.
    """
    sys.path.insert(0, os.getcwd())  # users' losses and corrections by dotted path
    from penstock.trainer import BadDump, replay_dump

    try:
        result = replay_dump(dump)
    except BadDump as error:
        typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(2) from None
    typer.echo(text_of(result))
    raise typer.Exit(0 if result.reproduced else 1)


def text_of(result: Replayed) -> str:
    """What a person reads."""
    dump = result.dump
    episodes = sum(len(share.episodes) for share in dump.shares)
    lines = [
        f"step {dump.step}, minibatch {dump.minibatch}: {len(dump.shares)} ranks, {episodes} episodes",
        "               recorded      replayed",
        f"loss           {dump.loss:<14.8g}{result.loss:.8g}",
        f"gradient norm  {dump.grad_norm:<14.8g}{result.grad_norm:.8g}",
        "the same" if result.reproduced else "NOT the same: other versions, another device, or a changed algorithm",
    ]
    if not result.causes:
        return "\n".join([*lines, "everything is finite"])
    lines.append(f"first not finite: {result.causes[0]}")
    lines += [f"            then: {cause}" for cause in result.causes[1:MOST_CAUSES]]
    hidden = len(result.causes) - MOST_CAUSES
    return "\n".join([*lines, *([f"                  … and {hidden} more"] if hidden > 0 else [])])
