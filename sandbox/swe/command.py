"""A test command that is pytest, taken apart."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

_VARIABLE = re.compile(r"[A-Za-z_]\w*=")


@dataclass(frozen=True, slots=True)
class PytestCommand:
    """``[NAME=VALUE …] PYTHON -m pytest [ARGUMENTS]``"""

    python: str
    arguments: tuple[str, ...]
    variables: Mapping[str, str]
    paths: tuple[str, ...]
    """``PYTHONPATH`` of the command: put on the path only when the runner itself has been imported."""

    @classmethod
    def parse(cls, command: str) -> PytestCommand | None:
        """None where it is another command."""
        words = shlex.split(command)
        variables = {}
        while words and _VARIABLE.match(words[0]):
            name, _, value = words.pop(0).partition("=")
            variables[name] = value
        if words[:1] in (["pytest"], ["py.test"]):
            words[:1] = ["python3", "-m", "pytest"]
        if words[1:3] != ["-m", "pytest"]:
            return None
        paths = tuple(path for path in variables.pop("PYTHONPATH", "").split(os.pathsep) if path and "$" not in path)
        return cls(words[0], tuple(words[3:]), variables, paths)
