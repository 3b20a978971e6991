"""Scripted policies that prove the environment: one that uses the tool earns everything, one that guesses nothing.

penstock rehearse recipes/calculator.yaml --policy recipes/projects/calculator/policies.py:oracle --expect 1
penstock rehearse recipes/calculator.yaml --policy recipes/projects/calculator/policies.py:null --expect 0
"""

from penstock.testing import EpisodeState


def oracle(state: EpisodeState) -> str:
    """Calls the tool, and answers what it said: right only where the tool really ran."""
    if not state.turn:
        return state.call("python", code=f"print(round({state.task.extra_info['expression']},4))")
    return state.results[-1]


def null(state: EpisodeState) -> str:
    """Never calls."""
    return "I do not know."
