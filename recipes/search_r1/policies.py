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


def oracle(scene: EpisodeState) -> str:
    """Looks up the articles that the row names, one a turn, and answers only what it has read there."""
    queries = [str(title) for title in scene.task.extra_info["articles"]]
    if scene.turn < len(queries):
        return scene.call("search", query=queries[scene.turn])
    read = normalised(" ".join(scene.results))
    for reference in targets_of(scene.task.ground_truth):
        if normalised(reference) in read:
            return f"<answer>{reference}</answer>"
    return UNKNOWN


def null(scene: EpisodeState) -> str:
    """Answers without looking."""
    return UNKNOWN


def reader(scene: EpisodeState) -> str:
    """Finds every passage and never answers: must earn nothing."""
    return scene.call("search", query=str(scene.task.extra_info["articles"][0]))


def one_search(scene: EpisodeState) -> str:
    """Looks up the first article and answers with what it should have looked up next: must earn nothing."""
    first, second = scene.task.extra_info["articles"]
    return scene.call("search", query=str(first)) if scene.turn == 0 else f"<answer>{second}</answer>"
