"""Settings of earlier releases that no longer exist. A recipe that still has one is refused with a sentence that says
since when it is gone and what to do; `penstock.deploy.config` reads the table."""

from __future__ import annotations

SINCE_0_2: dict[str, str] = {
    "placement.hand_over_timeout_s": "the trainer waits 900 s for the engines' devices; delete the line",
    "restart_window_s": "a role's max_restarts count within an hour; delete the line",
    "stall_action": "a stalled run ends, and --resume continues it; a larger stall_timeout_s waits longer",
}
"""Dotted key of a setting that 0.2.0 removed, to what a user does instead: a sentence without a full stop."""


def removed(key: str) -> str | None:
    """A sentence about the setting `key` (dotted), or None if no release had it.

    A key below a removed section counts: with `a.b` in the table, `a.b.c` is removed, too.
    """
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        advice = SINCE_0_2.get(".".join(parts[:length]))
        if advice is not None:
            return f"was removed in Penstock 0.2.0: {advice}"
    return None
