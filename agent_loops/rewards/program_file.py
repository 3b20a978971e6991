"""The reward that the program of a loop `command` wrote into a file which `agent.settings.collect` names.

A number, or JSON ``{"reward": 0.5, "metrics": {"name": 1.0}}``. For programs that grade themselves, as environments of
verifiers do: whatever runs in their box can write that file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from penstock.agent_loops.errors import InfraFailure

PROGRAM = "program"


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any], file: str = "~/reward.json"
) -> dict[str, float]:
    """Raises `InfraFailure` where there is no such file, or no number in it: never a 0."""
    program = extra_info.get(PROGRAM)
    if program is None:
        raise InfraFailure("reward", "program_file: it is for agent.loop: command")
    found = program["files"].get(file)
    if found is None:
        ended = f"exit status {program['exit_code']}, {str(program['stderr'])[-400:]}"
        raise InfraFailure(
            "reward", f"program_file: the program left no {file} ({ended}); is it in agent.settings.collect?"
        )
    given = _read(found, file)
    metrics = given.get("metrics") or {}
    numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, bool | int | float)}
    return {**numbers, "score": _number(given.get("reward"), file)}


def _read(text: str, file: str) -> Mapping[str, Any]:
    try:
        given = json.loads(text)
    except ValueError as error:
        raise InfraFailure("reward", f"program_file: {file} is no number and no JSON: {text[:200]!r}") from error
    return given if isinstance(given, dict) else {"reward": given}


def _number(value: Any, file: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InfraFailure("reward", f"program_file: the reward in {file} is no finite number: {value!r}")
    return float(value)
