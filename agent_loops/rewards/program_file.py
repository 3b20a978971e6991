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


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any], file: str = "~/reward.json"
) -> dict[str, float]:
    """Raises `InfraFailure` where there is no such file, or no number in it: never a 0."""
    program = extra_info.get("program")
    if program is None:
        raise InfraFailure("reward", "program_file: it is for agent.loop: command")
    text = program["files"].get(file)
    if text is None:
        ended = f"exit status {program['exit_code']}, {str(program['stderr'])[-400:]}"
        raise InfraFailure(
            "reward", f"program_file: the program left no {file} ({ended}); is it in agent.settings.collect?"
        )
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InfraFailure("reward", f"program_file: {file} is no number and no JSON: {text[:200]!r}") from error
    content = parsed if isinstance(parsed, dict) else {"reward": parsed}
    metrics = content.get("metrics") or {}
    if not isinstance(metrics, dict):
        raise InfraFailure("reward", f"program_file: the metrics in {file} are no object: {metrics!r:.200}")
    numbers = {name: number for name, value in metrics.items() if (number := finite_number(value)) is not None}
    reward = finite_number(content.get("reward"))
    if reward is None or isinstance(content.get("reward"), bool):
        raise InfraFailure(
            "reward", f"program_file: the reward in {file} is no finite number: {content.get('reward')!r:.200}"
        )
    return {**numbers, "score": reward}


def finite_number(value: Any) -> float | None:
    """`value` as a float; None where it is no number or has no finite one. What a program wrote may be any JSON."""
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    except OverflowError:  # an integer of 400 digits
        return None
