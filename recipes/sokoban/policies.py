"""Scripted policies that prove the rooms.

penstock rehearse recipes/sokoban/learn.yaml --policy recipes/sokoban/policies.py:oracle --expect 1
penstock rehearse recipes/sokoban/learn.yaml --policy recipes/sokoban/policies.py:pacer --expect 0
"""

from __future__ import annotations

from room import SIZE, drawn, solution

from penstock.testing import EpisodeState


def oracle(state: EpisodeState) -> str:
    """The next move of a shortest solution."""
    start, goal = drawn(int(state.task.extra_info["seed"]))
    return solution(start, goal, SIZE)[state.turn]


def pacer(state: EpisodeState) -> str:
    """Walks up and down: must earn nothing, since no room is solved in fewer than three moves."""
    return "ud"[state.turn % 2]
