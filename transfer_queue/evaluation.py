"""Names of the lanes in which policy versions are evaluated, and whether one of them is at work."""

from __future__ import annotations

from penstock.transfer_queue.queue import Status

_PREFIX = "eval/"


def evaluation_lane(version: int) -> str:
    return f"{_PREFIX}{version}"


def under_evaluation(status: Status, version: int) -> bool:
    """Whether episodes that a server at `version` may sample wait in another lane than ``train``, or are at work.

    An evaluation of a newer version does not count: it waits until a server has that one.
    """
    busy = (lane for lane, counts in status.other_lanes.items() if counts.get("queued", 0) + counts.get("leased", 0))
    return any(_oldest(lane) <= version for lane in busy)


def _oldest(lane: str) -> int:
    """The oldest version that may sample a lane's episodes; 0 for lanes of other names."""
    number = lane.removeprefix(_PREFIX)
    return int(number) if lane.startswith(_PREFIX) and number.isdecimal() else 0
