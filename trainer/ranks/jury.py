"""What the reports of all ranks' monitors mean: which rank is lost, and which keeps the others waiting.

Decisions alone: no process, no connection and no clock of its own. `ranks.monitor` has the rules in words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.trainer.ranks.observer import LOOK_S

GRACE_S = 20.0
"""For ranks whose peer has ended: they fail by themselves, with a cause of their own, in less."""
_PEER_LOST = re.compile(
    r"by peer|remote (worker|process|error)|connection (was likely )?(closed|reset|refused|aborted)|broken pipe"
    r"|ncclremoteerror|communicator was aborted|failed to recv|timed out",
    re.IGNORECASE,
)
"""Of gloo, NCCL and torch's store: what a rank says whose collective failed because another one has ended."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Every rank ends for this cause."""

    text: str
    grace_s: float = 0.0
    may_be_echo: bool = False
    """An error that the end of another rank may have caused: collectives fail in all peers of a rank that is gone."""
    blames_peer: bool = False
    """It says so itself."""


@dataclass(slots=True)
class Watched:
    """One rank, as the hub knows it."""

    rank: int
    host: str
    pid: int
    heard_at: float
    doing: str = "nothing that it reported"
    left: bool = False
    waits_since: float | None = None
    """Waits for others in every report since."""
    apart_since: float | None = None
    """Works, and waits for no other, in every report since."""

    def hear(self, report: Mapping[str, Any], now: float) -> None:
        self.heard_at, self.doing = now, str(report.get("doing") or self.doing)
        working = report.get("works") and not report.get("waits")
        self.waits_since = _kept(self.waits_since, now) if report.get("waits") else None
        self.apart_since = _kept(self.apart_since, now) if working else None

    @property
    def described(self) -> str:
        return f"{self.name}, which last did this: {self.doing}"

    @property
    def name(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


def likelier(first: Verdict | None, then: Verdict) -> Verdict:
    """Of two that may be echoes, in the order in which they were heard: the first, unless it alone blames a peer."""
    return then if first is None or (first.blames_peer and not then.blames_peer) else first


class Jury:
    """Decides from the reports of all ranks. Times are the hub's own clock."""

    def __init__(self, timeout_s: float) -> None:
        self.ranks: dict[int, Watched] = {}
        self._timeout_s = timeout_s
        self._judged_at: float | None = None
        self._warned = False

    def report(self, watched: Watched, report: Mapping[str, Any], now: float) -> Verdict | None:
        """A line of a monitor."""
        watched.hear(report, now)
        if "left" in report:
            watched.left = True
            reason = str(report["left"])
            verdict = self._about(watched, f"it ended with {reason}", GRACE_S)
            blames_peer = bool(_PEER_LOST.search(reason))
            return replace(verdict, may_be_echo=True, blames_peer=blames_peer) if reason else None
        return self._about(watched, str(report["state"])) if report.get("state") else None

    def lost(self, watched: Watched) -> Verdict | None:
        """The connection to its monitor broke."""
        return None if watched.left else self._about(watched, "it, or its monitor, has ended without a report", GRACE_S)

    def judge(self, now: float) -> Verdict | None:
        """Silent ranks. Time in which this process itself did not run is given back to all."""
        gap_s = now - (self._judged_at if self._judged_at is not None else now)
        self._judged_at = now
        present = [one for one in self.ranks.values() if not one.left]
        if gap_s > 3 * LOOK_S:
            for one in present:
                one.heard_at = min(one.heard_at + gap_s, now)
        for one in present:
            if now - one.heard_at > self._timeout_s:
                return self._about(one, f"nothing was heard of it for {now - one.heard_at:.0f} s")
        return None

    def slow(self, now: float) -> str:
        """A warning where ranks keep others waiting; once, until they no longer do."""
        present = [one for one in self.ranks.values() if not one.left]
        waiting = [one for one in present if _is_over(one.waits_since, now, self._timeout_s)]
        late = [one for one in present if _is_over(one.apart_since, now, self._timeout_s)]
        if not waiting or not late:
            self._warned = False
            return ""
        if self._warned:
            return ""
        self._warned = True
        names = "; ".join(f"{one.name} is at work {one.doing}" for one in late)
        return (
            f"{len(waiting)} rank(s) have waited {self._timeout_s:.0f} s for others: {names}. This is taken for slow "
            "work: nothing is ended before trainer.collective_timeout_s"
        )

    def _about(self, watched: Watched, what: str, grace_s: float = 0.0) -> Verdict:
        return Verdict(f"{watched.name}: {what}. It last did this: {watched.doing}", grace_s)


def _kept(since: float | None, now: float) -> float:
    return now if since is None else since


def _is_over(since: float | None, now: float, limit_s: float) -> bool:
    return since is not None and now - since >= limit_s
