"""What a check says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One finding. `mend` says what to do where it is not ok, or where it is but `warns`."""

    name: str
    ok: bool
    found: str
    mend: str = ""
    skipped: bool = False
    """It could not be asked here, or does not matter; `found` says why."""
    warns: bool = False
    """The run can go on with it, and would do better without."""

    @property
    def verdict(self) -> str:
        """``ok``, ``warn``, ``skip`` or ``FAIL``"""
        if not self.ok:
            return "FAIL"
        return "skip" if self.skipped else "warn" if self.warns else "ok"


def skipped(name: str, why: str) -> Check:
    return Check(name, True, why, skipped=True)


def warning(name: str, found: str, mend: str) -> Check:
    return Check(name, True, found, mend, warns=True)
