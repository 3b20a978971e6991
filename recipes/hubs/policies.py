"""Scripted policies that prove the problems of `reasoning_gym.yaml` without a model.

penstock rehearse recipes/hubs/reasoning_gym.yaml --policy recipes/hubs/policies.py:oracle --expect 1
penstock rehearse recipes/hubs/reasoning_gym.yaml --policy recipes/hubs/policies.py:null --expect 0
"""

from __future__ import annotations

from penstock.testing import EpisodeState


def oracle(state: EpisodeState) -> str:
    """The row's own answer."""
    return f"<answer>{state.task.ground_truth}</answer>"


def null(state: EpisodeState) -> str:
    """None."""
    return "<answer></answer>"
