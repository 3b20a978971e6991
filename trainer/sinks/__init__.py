"""Destinations of a run's metrics besides ``metrics.jsonl``, by name. `trainer.sinks` chooses.

    recorder ──► jsonl (what the run itself reads; always there)
             └─► `AsyncSink` ──queue──► its own thread ──► tensorboard | wandb | yours

A sink is a function (SinkJob) → `MetricSink` in its own file here, registered with `SINKS.register(name)`, or
anywhere as ``my_package.my_module:function``. Importing one loads none of its libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from penstock.common import Registry

Record = Mapping[str, Any]
"""A trajectory for people, see `recorder.readable_trajectory`."""


class MetricSink(Protocol):
    """Called by rank 0's recorder, one call at a time. What it raises stops the run for ``jsonl`` alone: any other sink
    is logged once and left out from then on.
    """

    def rewind(self, step: int) -> None:
        """First of all calls, and once: the run begins at `step`. Values of this and later steps come again."""

    def step(self, version: int, metrics: Mapping[str, Any]) -> None:
        """The numbers of the step that made `version`; mappings and texts among them."""

    def evaluation(self, version: int, values: Mapping[str, float]) -> None:
        """``eval/…`` of `version`; may come late, after further steps."""

    def trajectories(self, step: int, records: Sequence[Record]) -> None:
        """Some episodes of a step, to read; before the numbers of that step."""

    def close(self) -> None:
        """The last call."""


@dataclass(frozen=True, slots=True)
class SinkJob:
    """The input of a sink."""

    run_dir: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The run's resolved recipe, as plain data; empty where the trainer was started without one."""

    @property
    def name(self) -> str:
        """The run's."""
        return self.run_dir.name


MakeSink = Callable[[SinkJob], MetricSink]

SINKS: Registry[MakeSink] = Registry("metric sink", package=__name__)


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Every number of a line, one level of mappings unfolded: ``staleness_tokens/0``. Texts are left out."""
    numbers_by_name: dict[str, float] = {}
    for name, value in metrics.items():
        pairs = value.items() if isinstance(value, Mapping) else ()
        for full, one in [(name, value), *((f"{name}/{key}", item) for key, item in pairs)]:
            if isinstance(one, int | float):
                numbers_by_name[full] = one
    return numbers_by_name


def plain_text(record: Record) -> str:
    """Prompt and runs as they were fed and sampled, each under a line that says which; ids if there is no text."""
    head = f"{record['episode_id']}  reward {record['reward']}  {record['outcome']['kind']}"
    parts = [head]
    for segment in record["segments"]:
        parts += ["── prompt", _text(segment["prompt"])]
        for run in segment["runs"]:
            versions = ", ".join(str(version) for version, _ in run.get("versions", ()))
            title = f"sampled, version {versions}" if versions else "sampled"
            parts += [f"── {title if run['mask'] else 'fed'}", _text(run["text"])]
    return "\n".join(parts)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else " ".join(map(str, value))
