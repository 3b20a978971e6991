"""Rates at which weights travel, each with its source: measured by a benchmark of this project, or cited.

What is neither is no rate of this file: docs/scale.md lists it as an assumption.
"""

from __future__ import annotations

from dataclasses import dataclass

MEASURED_BYTES = 1024 * 2**20
"""Of the version that `penstock bench weights` fetches."""
MACHINE = "two CPU cores, loopback"


@dataclass(frozen=True, slots=True)
class Rate:
    """Bytes of a full version per second, from its announcement until a server has it verified."""

    bytes_per_s: float
    measured: bool
    """By this project; a cited rate is false."""
    source: str


def _fetched(seconds: float, key: str) -> Rate:
    source = f"`penstock bench weights`, `{key}`: 1 GiB in {seconds:g} s; {MACHINE}"
    return Rate(MEASURED_BYTES / seconds, measured=True, source=source)


RATES = {
    "broadcast": _fetched(1.91, "collective_full"),
    "http": _fetched(2.74, "http_full"),
    "shm": _fetched(0.46, "shm_full"),
    "disk": _fetched(0.14, "disk_full"),
    "nccl": Rate(
        8.25e9,
        measured=False,
        source="verl's NCCL checkpoint engine, by its own documentation; verification not included",
    ),
}
