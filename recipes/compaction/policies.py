"""Scripted policies that prove the environment.

penstock rehearse recipes/compaction/cpu.yaml --policy recipes/compaction/policies.py:oracle --expect 1
penstock rehearse recipes/compaction/cpu.yaml --policy recipes/compaction/policies.py:forgetful --expect 0
"""

from __future__ import annotations

from penstock.testing import EpisodeState

ASKED = "Notes?<|im_end|>"


def oracle(state: EpisodeState) -> str:
    """Keeps every digit."""
    return _plays(state, first=0)


def forgetful(state: EpisodeState) -> str:
    """Keeps what was read since the last summary: must earn nothing."""
    summaries = [place for place, fed in enumerate(state.observed) if ASKED in fed]
    since = summaries[-2] if len(summaries) > 1 and _is_asked(state) else summaries[-1] if summaries else 0
    return _plays(state, first=_read(state.observed[: since + 1]) if summaries else 0)


def _plays(state: EpisodeState, first: int) -> str:
    digits, read = str(state.task.extra_info["digits"]), _read(state.observed)
    if _is_asked(state):
        return f"{digits[first:read]} {'end' if read == len(digits) else 'more'}"
    return digits[first:] if read == len(digits) else state.call("next")


def _is_asked(state: EpisodeState) -> bool:
    return bool(state.observed) and ASKED in state.observed[-1]


def _read(observed: object) -> int:
    return str(observed).count("<tool_response>")
