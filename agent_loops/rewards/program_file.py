"""The reward that the program of a loop `command` wrote into a file which `agent.settings.collect` names.

A number, or JSON ``{"reward": 0.5, "metrics": {"name": 1.0}}``. For programs that grade themselves, as environments of
verifiers do: whatever runs in their box can write that file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from penstock.agent_loops.errors import InfraFailure, NoReward
from penstock.common.errors import finite_number


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any], file: str = "~/reward.json"
) -> dict[str, float]:
    """Raises `NoReward` where the program wrote no such file, or no finite number into it, and `InfraFailure` where the
    recipe cannot have such a file.
    """
    program = extra_info.get("program")
    if program is None:
        raise InfraFailure("reward", "program_file: it is for agent.loop: command")
    if file not in program["collect"]:
        raise InfraFailure("reward", f"program_file: {file} is not collected: name it in agent.settings.collect")
    try:
        parsed = json.loads(program["files"].get(file, ""))
    except (ValueError, RecursionError):
        parsed = None
    content = parsed if isinstance(parsed, dict) else {"reward": parsed}
    reward = finite_number(content.get("reward"))
    if reward is None or isinstance(content.get("reward"), bool):
        ended = f"exit status {program['exit_code']}, {str(program['stderr'])[-400:]}"
        raise NoReward("reward", f"program_file: the program left no finite number in {file} ({ended})")
    metrics = content.get("metrics")
    items = metrics.items() if isinstance(metrics, dict) else ()
    numbers = {name: number for name, value in items if (number := finite_number(value)) is not None}
    return {**numbers, "score": reward}
