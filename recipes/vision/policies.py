"""Scripted policies that prove the environments.

penstock rehearse recipes/vision/cpu.yaml --policy recipes/vision/policies.py:oracle --expect 1
penstock rehearse recipes/vision/cpu.yaml --policy recipes/vision/policies.py:null --expect 0
penstock rehearse recipes/vision/screen.yaml --policy recipes/vision/policies.py:opens --expect 1
penstock rehearse recipes/vision/screen.yaml --policy recipes/vision/policies.py:looks --expect 0
"""

from __future__ import annotations

from screen import VIEWS

from penstock.testing import EpisodeState


def oracle(state: EpisodeState) -> str:
    """The right answer, from the row."""
    return str(state.task.ground_truth)


def null(state: EpisodeState) -> str:
    """No answer."""
    return "Which?"


def opens(state: EpisodeState) -> str:
    """Looks at the page, then presses the key of the view."""
    if state.turn == 0:
        return state.call("computer", action="look")
    if state.turn == 1:
        return state.call("computer", action="press", text=VIEWS[str(state.task.extra_info["view"])])
    return "done"


def looks(state: EpisodeState) -> str:
    """Looks at the page and does not move: must earn nothing."""
    return state.call("computer", action="look") if state.turn == 0 else "done"
