"""Scripted policies that prove the environment, and show a model how to act (`cold_start.py`).

    penstock rehearse recipes/retool/cpu.yaml --policy recipes/retool/policies.py:oracle --expect 1
    penstock rehearse recipes/retool/cpu.yaml --policy recipes/retool/policies.py:null --expect 0
    penstock rehearse recipes/retool/cpu.yaml --policy recipes/retool/policies.py:parrot --expect 0
"""

from __future__ import annotations

import re

from penstock.agent_loops.rehearsal import Scene
from penstock.deploy.data.arithmetic import BadExpression, canonical, evaluate

_ANNOTATION = re.compile(r"<<([^<>=]*)=([^<>]*)>>")


def oracle(scene: Scene) -> str:
    """Computes with the tool, and answers what the tool printed last: right only where the tool really ran."""
    if not scene.turn:
        return scene.call("python", code=_code(scene))
    return f"The answer is \\boxed{{{scene.results[-1].strip().splitlines()[-1]}}}."


def null(scene: Scene) -> str:
    """Does nothing."""
    return "I do not know."


def parrot(scene: Scene) -> str:
    """Lets the tool print the answer again and again, and never says it: must earn nothing."""
    truth = str(scene.task.ground_truth)
    return scene.call("python", code=f"print({f'\\boxed{{{truth}}}'!r})")


def _code(scene: Scene) -> str:
    """The row's own expression; GSM8K's annotations step by step; else the reference itself."""
    told = scene.task.extra_info
    if told.get("expression"):
        return f"print(round({told['expression']},4))"
    steps = [f"print(round({text}, 6))" for text in _steps(str(told.get("answer", "")))]
    return "\n".join([*steps, f"print({str(scene.task.ground_truth)!r})"])


def _steps(solution: str) -> list[str]:
    """``48/2`` of each ``<<48/2=24>>`` that is arithmetic; nothing from a file is run that is not."""
    found = []
    for text, _ in _ANNOTATION.findall(solution):
        try:
            evaluate(canonical(text))
        except BadExpression:
            continue
        found.append(canonical(text))
    return found
