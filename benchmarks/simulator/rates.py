"""Rates of weight transfer: measured here, with the benchmark's figure; and inputs of a plan, which were not measured.

    MEASURED       figures of `penstock bench weights`, one run on a quiet machine
    PLAN_INPUTS    what was not measured here: cited from others, or assumed. Replace it by your own figures

A rate belongs to one of the two, never to both. To replace the measured ones, take all of one run, and its commit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MiB = 2**20
MEASURED_AT = "9eb0499d"
"""The commit of the figures below."""

BROADCAST_S, BROADCAST_BYTES = 0.3454, 512 * MiB
"""`figures.broadcast.one_rank_s`: to two workers, until both have checked all tensors."""
FETCH_S = {"http_full": 0.8093, "http_delta": 0.1290, "shm_full": 0.2610, "disk_full": 0.1140}
"""`figures.fetch_s`: from the announcement until all tensors are read and checked. In a delta 2 % of the values
differ; its rate too is in bytes of the full version that it makes."""
PAUSE_P50_S, PAUSE_P99_S, PAUSED_MB = 0.2208, 0.2526, 208.5
"""`figures.pause`: two vLLM servers on CPUs with 8 requests each, one updated at a time; the model's size."""


@dataclass(frozen=True, slots=True)
class MeasuredRate:
    """Bytes of a full version per second, from its announcement until a server has it verified."""

    bytes: float
    seconds: float
    key: str
    """Path of the figure in the output of `penstock bench weights --json`."""

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.seconds

    @property
    def source(self) -> str:
        size = f"{self.bytes / MiB:,.0f} MiB in {self.seconds:g} s"
        return f"`penstock bench weights`, `{self.key}`: {size}; commit {MEASURED_AT}"


MEASURED = {
    "broadcast": MeasuredRate(BROADCAST_BYTES, BROADCAST_S, "figures.broadcast.one_rank_s"),
    **{name: MeasuredRate(1024 * MiB, taken, f"figures.fetch_s.{name}") for name, taken in FETCH_S.items()},
}


@dataclass(frozen=True, slots=True)
class PlanInput:
    """A figure that a plan needs and that no benchmark of this project has measured."""

    value: float
    unit: str
    kind: Literal["cited", "assumed"]
    source: str
    """Source of a cited figure; of an assumed one the reason and the benchmark that measures it."""


PLAN_INPUTS = {
    "nccl_gb_per_s": PlanInput(
        8.25, "GB/s", "cited", "verl's NCCL checkpoint engine, by its own documentation; verification not included"
    ),
    "decode_factor": PlanInput(
        3.5,
        "× the datasheet's time",
        "cited",
        "solved for on verl's published 7B runs, which come to 3.2 to 5.0; `penstock bench rollout` measures yours",
    ),
    "flops_share": PlanInput(
        0.35,
        "of the datasheet's FLOPs",
        "assumed",
        "8 FLOPs per parameter and token; `tokens_per_s` of your own `metrics.jsonl` replaces it",
    ),
    "pause_s": PlanInput(
        0.5,
        "s",
        "assumed",
        "a GPU that loads a verified version; `figures.pause` of `penstock bench weights` measures yours",
    ),
}


def planned(name: str) -> float:
    """The value of a plan's input."""
    return PLAN_INPUTS[name].value
