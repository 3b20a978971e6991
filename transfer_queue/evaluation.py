"""Names of the splits in which policy versions are evaluated, and whether one of them is at work."""

from __future__ import annotations

from penstock.transfer_queue.queue import Status

_PREFIX = "eval/"


def evaluation_split(version: int) -> str:
    return f"{_PREFIX}{version}"


def under_evaluation(status: Status, version: int) -> bool:
    """Whether episodes that a server at `version` may sample wait in another split than ``train``, or are at work.

    An evaluation of a newer version does not count: it waits until a server has that one.
    """
    busy = (split for split, counts in status.other_splits.items() if counts.get("queued", 0) + counts.get("leased", 0))
    return any(_oldest(split) <= version for split in busy)


def _oldest(split: str) -> int:
    """The oldest version that may sample a split's episodes; 0 for splits of other names."""
    number = split.removeprefix(_PREFIX)
    return int(number) if split.startswith(_PREFIX) and number.isdecimal() else 0
