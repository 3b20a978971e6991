"""Scripted policies that prove the environment, and show a model how to act (`penstock sft`).

penstock rehearse recipes/retool/cpu.yaml --policy recipes/retool/policies.py:oracle --expect 1
penstock rehearse recipes/retool/cpu.yaml --policy recipes/retool/policies.py:null --expect 0
penstock rehearse recipes/retool/cpu.yaml --policy recipes/retool/policies.py:parrot --expect 0
penstock rehearse recipes/retool/learn.yaml --policy recipes/retool/policies.py:patient --expect 1
penstock rehearse recipes/retool/learn.yaml --policy recipes/retool/policies.py:hasty --expect 0
"""

from __future__ import annotations

import re

from penstock.datasets import BadExpression, canonical, evaluate
from penstock.testing import EpisodeState

_ANNOTATION = re.compile(r"<<([^<>=]*)=[^<>]*>>")
TOLERANCE = 1e-6


def oracle(state: EpisodeState) -> str:
    """Computes with the tool, and answers what the tool printed last: right only where the tool really ran."""
    if not state.turn:
        return state.call("python", code=_code(state))
    return f"The answer is \\boxed{{{state.results[-1].strip().splitlines()[-1]}}}."


def stepwise(state: EpisodeState) -> str:
    """Makes one call for each annotated calculation of GSM8K's solution, and answers what the last one printed."""
    steps = _steps(str(state.task.extra_info["answer"]))
    if state.turn < len(steps):
        return state.call("python", code=f"print({steps[state.turn][0]})")
    return f"The answer is \\boxed{{{state.results[-1].strip()}}}."


def null(state: EpisodeState) -> str:
    """Does nothing."""
    return "I do not know."


def parrot(state: EpisodeState) -> str:
    """Lets the tool print the answer again and again, and never says it: must earn nothing."""
    answer = f"\\boxed{{{state.task.ground_truth}}}"
    return state.call("python", code=f"print({answer!r})")


def patient(state: EpisodeState) -> str:
    """Makes one call for each part of a sum, as long as the tool names the next one; then answers the last result."""
    if not state.turn:
        return _call(state, str(state.task.extra_info["parts"]).split()[0])
    result, _, following = state.results[-1].strip().partition("\nthen ")
    return _call(state, f"{result}{following}") if following else result


def hasty(state: EpisodeState) -> str:
    """Calls once, and answers what was printed: must earn nothing, however many parts a sum has."""
    return patient(state) if not state.turn else state.results[-1].strip().splitlines()[0]


def _call(state: EpisodeState, expression: str) -> str:
    return state.call("python", code=f"print(round({expression},4))")


def _code(state: EpisodeState) -> str:
    """The row's expression; GSM8K's annotations step by step; the reference if they do not lead to it."""
    extra_info = state.task.extra_info
    if extra_info.get("expression"):
        return f"print(round({extra_info['expression']},4))"
    steps = _steps(str(extra_info.get("answer", "")))
    lines = [f"print(round({text}, 6))" for text, _ in steps]
    if not steps or abs(steps[-1][1] - float(state.task.ground_truth)) > TOLERANCE:
        lines.append(f"print({str(state.task.ground_truth)!r})")
    return "\n".join(lines)


def _steps(solution: str) -> list[tuple[str, float]]:
    """(``48/2``, 24) of each ``<<48/2=24>>`` that is arithmetic; nothing from a file is run that is not."""
    steps = []
    for annotation in _ANNOTATION.findall(solution):
        text = canonical(annotation)
        try:
            steps.append((text, float(evaluate(text))))
        except BadExpression:
            continue
    return steps
