"""Scripted policies that prove the environment.

penstock rehearse recipes/compaction/cpu.yaml --policy recipes/compaction/policies.py:oracle --expect 1
penstock rehearse recipes/compaction/cpu.yaml --policy recipes/compaction/policies.py:forgetful --expect 0
"""

from __future__ import annotations

from penstock.testing import EpisodeState

ASKED = "Notes?<|im_end|>"


def oracle(scene: EpisodeState) -> str:
    """Keeps every digit."""
    return _plays(scene, first=0)


def forgetful(scene: EpisodeState) -> str:
    """Keeps what was read since the last summary: must earn nothing."""
    summaries = [place for place, fed in enumerate(scene.observed) if ASKED in fed]
    since = summaries[-2] if len(summaries) > 1 and _is_asked(scene) else summaries[-1] if summaries else 0
    return _plays(scene, first=_read(scene.observed[: since + 1]) if summaries else 0)


def _plays(scene: EpisodeState, first: int) -> str:
    digits, read = str(scene.task.extra_info["digits"]), _read(scene.observed)
    if _is_asked(scene):
        return f"{digits[first:read]} {'end' if read == len(digits) else 'more'}"
    return digits[first:] if read == len(digits) else scene.call("next")


def _is_asked(scene: EpisodeState) -> bool:
    return bool(scene.observed) and ASKED in scene.observed[-1]


def _read(observed: object) -> int:
    return str(observed).count("<tool_response>")
