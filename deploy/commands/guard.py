"""Mistakes of people are one message, not a traceback."""

from __future__ import annotations

from collections.abc import Callable

import typer

from penstock.deploy.config import ConfigError


def guarded(work: Callable[[], None], *mistakes: type[Exception]) -> None:
    """Run `work`; a `ConfigError`, or one of `mistakes`, ends the command with status 2 and its message."""
    kinds: tuple[type[Exception], ...] = (ConfigError, *mistakes)
    try:
        work()
    except kinds as error:
        typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(2) from None
