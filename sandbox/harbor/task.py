"""A task folder as data, whichever format it is written in, and its errors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penstock.sandbox.harbor.packing import BuildContext
from penstock.sandbox.protocol import BoxNeeds

DEFAULT_VERIFIER_S = 600.0
DEFAULT_BUILD_S = 600.0


class HarborTaskError(Exception):
    """A task folder is incomplete or asks for what is not supported, or its box cannot be set up: the text names the
    task and the field. Never the model's fault."""


@dataclass(frozen=True, slots=True)
class Healthcheck:
    """A command that ends with 0 once the environment is ready, before the agent begins."""

    command: str
    interval_s: float = 5.0
    timeout_s: float = 30.0
    start_period_s: float = 0.0
    """Failures within it do not count as `retries`."""
    start_interval_s: float = 5.0
    retries: int = 3


@dataclass(frozen=True, slots=True)
class HarborTask:
    """The requirements of one task folder."""

    name: str
    """Name of the folder."""
    folder: Path
    instruction: str
    image: str | None
    """A name to have (`environment.docker_image`), or the one that `build` makes; None: the backend's own box."""
    tests: Path
    """Put into the box as /tests, after the agent."""
    build: BuildContext | None = None
    build_timeout_s: float = DEFAULT_BUILD_S
    workdir: str | None = None
    """None: that of the image."""
    needs: BoxNeeds = field(default_factory=lambda: BoxNeeds(own_root=True))
    agent_timeout_s: float | None = None
    verifier_timeout_s: float = DEFAULT_VERIFIER_S
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables of everything in the box; values as written, see `resolved`."""
    verifier_variables: Mapping[str, str] = field(default_factory=dict)
    solution_variables: Mapping[str, str] = field(default_factory=dict)
    uploads: Path | None = None
    """Put into the working directory of a ready-made image."""
    solution: Path | None = None
    test_script: bytes | None = None
    """Instead of the file in `tests`."""
    solve_script: bytes | None = None
    """Instead of a folder `solution`."""
    healthcheck: Healthcheck | None = None
    ignored: tuple[str, ...] = ()
    """Keys of its file that are read by neither Harbor nor Penstock, a sentence each."""

    @property
    def has_solution(self) -> bool:
        return self.solution is not None or self.solve_script is not None


def resolved(variables: Mapping[str, str], passed: Mapping[str, str], where: str) -> dict[str, str]:
    """``${NAME}`` and ``${NAME:-default}`` filled in from `passed` alone: a task may not read this process's secrets.

    Raises `HarborTaskError`.
    """
    return {name: _filled(name, value, passed, where) for name, value in variables.items()}


def _filled(name: str, value: str, passed: Mapping[str, str], where: str) -> str:
    match = re.fullmatch(r"\$\{([^}:]+)(?::-(.*))?\}", value)
    if match is None:
        return value
    source, default = match.groups()
    if source not in passed and default is None:
        raise HarborTaskError(
            f"{where}: {name} is the variable {source} of this machine, which tasks do not see: name it in pass_env"
        )
    return passed.get(source, default or "")
