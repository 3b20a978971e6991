"""Checks of `agent.loop: command` before a box is opened: its placeholders, and the program in `sandbox.folders`."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from pydantic import ValidationError

from penstock.common import nearest
from penstock.datasets import BadSpec
from penstock.deploy.config import RunConfig
from penstock.deploy.preflight.check import Check
from penstock.deploy.preflight.data import first_rows

if TYPE_CHECKING:
    from penstock.gateway import CommandSettings

LOOP = "command"
NAME = "agent.settings.command"


def check_program(config: RunConfig) -> Check | None:
    """Without it every episode of a misspelt command would fail by itself, each as a failure of the infrastructure."""
    from penstock.gateway import CommandSettings

    agents = [agent for agent in config.agent.of_sources() if agent.loop == LOOP] if config.agent.workers else []
    for agent in agents:
        try:
            settings = CommandSettings.model_validate(agent.settings)
        except ValidationError:
            return None  # `check_loop` says so
        if problem := _misspelt(config, settings) or _absent(config, settings.command):
            return problem
    return Check(NAME, True, "its placeholders are known") if agents else None


def _misspelt(config: RunConfig, settings: CommandSettings) -> Check | None:
    from penstock.gateway import columns_named, unknown_placeholder
    from penstock.trainer import DataError

    if not columns_named(settings):
        return None
    try:
        problem = unknown_placeholder(settings, [row.extra_info for row in first_rows(config, 512)])
    except (DataError, BadSpec):
        return None  # `check_data` says so
    fix = "correct the name; docs/extend/loop.md lists the placeholders, and each text or number of a row is another"
    return Check("agent.settings", False, problem, fix) if problem else None


def _absent(config: RunConfig, command: str | list[str]) -> Check | None:
    """The program itself, where its path is in a folder of this machine that a box of bwrap shows."""
    path = _program(command)
    inside = [folder for folder in config.sandbox.folders if path.is_relative_to(folder)]
    if config.sandbox.backend != "bwrap" or not inside:
        return None
    folder = max(inside, key=len)
    root = Path(config.sandbox.folders[folder]).expanduser().absolute()
    if not root.is_dir():
        return None  # `check_sandbox` says so
    here = root / path.relative_to(folder)
    where = f"{path} is {here} on this machine, which"
    if not os.path.lexists(here):
        names = [one.name for one in here.parent.iterdir()] if here.parent.is_dir() else []
        fix = f"correct {NAME}, or install the program into sandbox.folders.{folder}"
        return Check(NAME, False, f"{where} does not exist{nearest(here.name, names)}", fix)
    # A link may lead to a path that only the box has.
    if here.exists() and not (here.is_file() and os.access(here, os.X_OK)):
        fix = f"chmod +x {here}, or name its interpreter first: python3 {path}"
        return Check(NAME, False, f"{where} is not an executable file", fix)
    return None


def _program(command: str | list[str]) -> PurePosixPath:
    """The first word behind assignments of a line for `sh`; what the shell itself would still change is left alone."""
    try:
        words = shlex.split(command) if isinstance(command, str) else command
    except ValueError:
        words = []  # the shell says so
    names = [word for word in words if isinstance(command, list) or not re.match(r"[A-Za-z_]\w*=", word)]
    return PurePosixPath(names[0] if names else "")
