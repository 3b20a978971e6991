"""Scripted policies that prove the environment, and show a model how to act (`penstock sft`).

penstock rehearse recipes/search_r1/cpu.yaml --policy recipes/search_r1/policies.py:oracle --expect 1
penstock rehearse recipes/search_r1/cpu.yaml --policy recipes/search_r1/policies.py:null --expect 0
penstock rehearse recipes/search_r1/cpu.yaml --policy recipes/search_r1/policies.py:reader --expect 0

`one_search` is for questions that need two, as those of learn.yaml.
"""

from __future__ import annotations

from penstock.agent_loops.rewards import normalised, targets_of
from penstock.testing import EpisodeState

UNKNOWN = "<answer>I do not know</answer>"


def oracle(state: EpisodeState) -> str:
    """Looks up the articles that the row names, one a turn, and answers only what it has read there."""
    queries = [str(title) for title in state.task.extra_info["articles"]]
    if state.turn < len(queries):
        return state.call("search", query=queries[state.turn])
    read = normalised(" ".join(state.results))
    for reference in targets_of(state.task.ground_truth):
        if normalised(reference) in read:
            return f"<answer>{reference}</answer>"
    return UNKNOWN


def null(state: EpisodeState) -> str:
    """Answers without looking."""
    return UNKNOWN


def reader(state: EpisodeState) -> str:
    """Finds every passage and never answers: must earn nothing."""
    return state.call("search", query=str(state.task.extra_info["articles"][0]))


def one_search(state: EpisodeState) -> str:
    """Looks up the first article and answers with what it should have looked up next: must earn nothing."""
    first, second = state.task.extra_info["articles"]
    return state.call("search", query=str(first)) if state.turn == 0 else f"<answer>{second}</answer>"
