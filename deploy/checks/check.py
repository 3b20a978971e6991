"""What a check says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One finding. `mend` says what to do where it is not ok."""

    name: str
    ok: bool
    found: str
    mend: str = ""
