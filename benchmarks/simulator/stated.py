"""Cases of published runs: `cases/*.yaml`, read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field

from penstock.simulator.config import Section

FOLDER = Path(__file__).parent / "cases"
STEADY = 0.25
"""A baseline's window counts as steady while its mean step is so close to that of the first window."""


class Phases(Section):
    """Mean seconds per step of the synchronous run."""

    step_s: float = Field(gt=0, description="The whole step.")
    generation_s: float = Field(gt=0, description="Sampling alone, where the source separates it.")
    switching_s: float = Field(0, ge=0, description="Of the generation phase: what is not sampling.")
    update_s: float = Field(gt=0, description="The policy's update.")
    scoring_s: dict[str, float] = Field(default_factory=dict, description="Forward passes by name.")


class SynchronousRow(Section):
    gpus: int = Field(description="All of them, for both roles in turn.")
    phases: Phases = Field(description="As the table states them.")
    offload: bool = Field(description="Weights and optimizer rest in CPU memory while others use the GPU.")
    total_minutes: dict[int, float] = Field(default_factory=dict, description="Total time by number of steps.")

    @property
    def steady_window(self) -> int | None:
        """Steps of the longest stated window whose mean step is within STEADY of the first window's; None: no totals.

        Later the run does other work than it did at first (responses have become longer), and than the run it is
        compared with; nothing but the synchronous run's own pace decides.
        """
        pace = {steps: minutes / steps for steps, minutes in sorted(self.total_minutes.items())}
        first = next(iter(pace.values()), 0.0)
        return max((steps for steps, mean in pace.items() if abs(mean / first - 1) <= STEADY), default=None)

    @property
    def window_scale(self) -> float:
        """Mean step of the steady window over that of the whole run, whose means `phases` are."""
        window = self.steady_window
        if window is None:
            return 1.0
        last = max(self.total_minutes)
        return (self.total_minutes[window] / window) / (self.total_minutes[last] / last)


class AsynchronousRow(Section):
    rollout_gpus: int = Field(description="GPUs that only sample.")
    trainer_gpus: int = Field(description="GPUs that only train.")
    staleness: float = Field(description="Share of a step's samples that may be ahead.")
    chunks: int = Field(1, description="Parts of a step that the trainer takes as they are ready.")
    whole_batches: bool = Field(False, description="A batch's sampling begins when the one before has ended.")
    scoring: list[str] = Field(default_factory=list, description="Forward passes that this mode keeps.")
    offload: bool = Field(False, description="As above.")
    update_s: float | None = Field(None, description="Stated update time; read for `HOST_RATE_CASE` alone.")


class Stated(Section):
    machine: str = Field(description="A name in hardware.MACHINES.")
    model: str = Field(description="A name in hardware.MODELS.")
    response_longest: int = Field(description="Maximum response length, in tokens.")
    groups_per_step: int = Field(description="Prompts per step.")
    group_size: int = Field(description="Responses per prompt.")
    updates: int = Field(description="Optimizer updates per step: prompts per step over prompts per mini-batch.")
    rollout_parallel: int = Field(description="GPUs of one engine.")
    sequence_parallel: int = Field(description="GPUs that share one training sequence.")
    shards: int = Field(description="GPUs that together hold one copy of the trained weights.")
    optimizer: Literal["shards", "all"] = Field(
        "shards", description="Optimizer state is split over these, or over all."
    )
    synchronous: SynchronousRow
    asynchronous: AsynchronousRow


class Case(Section):
    name: str
    source: str = Field(description="Address, table and date.")
    settings_from: str = Field(description="Where settings stand that the table leaves out.")
    assumed: list[str] = Field(description="What no source states, and what was taken in its place.")
    stated: Stated
    published: dict[int, float] = Field(description="Speed-ups as the source states them, by steps from the start.")

    @property
    def window(self) -> int:
        """Steps of the window that is compared."""
        return self.stated.synchronous.steady_window or max(self.published)

    @property
    def speedup(self) -> float:
        return self.published[self.window]


def cases() -> dict[str, Case]:
    """Every case of the folder, by name."""
    groups = [_read(path) for path in sorted(FOLDER.glob("*.yaml"))]
    return {case.name: case for group in groups for case in group}


def _read(path: Path) -> list[Case]:
    tree = yaml.safe_load(path.read_text())
    return [Case.model_validate(_merged(tree["shared"], case)) for case in tree["cases"]]


def _merged(below: Mapping[str, object], above: Mapping[str, object]) -> dict[str, object]:
    """Mappings are merged, everything else of `above` wins."""
    both = {**below, **above}
    for key in below.keys() & above.keys():
        lower, upper = below[key], above[key]
        if isinstance(lower, Mapping) and isinstance(upper, Mapping):
            both[key] = _merged(lower, upper)
    return both
