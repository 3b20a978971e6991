"""A run's folder, and the queue where it lives, as processes of a trace.

timeline.jsonl ───────────────► trainer: steps with their phases; publish, checkpoint · evaluation
metrics.jsonl ────────────────► counters of the trainer
trajectories/step_*.jsonl ────► agent workers: episodes with turns, model and tool calls, reward
weight_updates.jsonl | queue ► rollout servers: fetch, pause with load

Clocks are those of the machines: roles of machines whose clocks differ are shifted against one another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.deploy.run_trace.episodes import episode_slice
from penstock.deploy.run_trace.slices import Process, Slice
from penstock.trainer import CHECKPOINT, EVALUATION, FILE, PUBLISH, STEPS, last_by_step, read_lines, read_timeline

Line = Mapping[str, Any]
COUNTERS = ("reward", "staleness_mean", "tokens_per_s")


class NothingToDraw(Exception):
    """The folder is no run's, or the run left nothing of those steps; the message says which."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Those to draw: first ≤ step < end."""

    first: int = 0
    end: int | None = None

    def __contains__(self, step: int) -> bool:
        return self.first <= step and (self.end is None or step < self.end)

    def version(self, version: int) -> bool:
        """Whether a step of these made the version, or was trained at it."""
        return version in self or version - 1 in self


def collect(root: Path, updates: Sequence[Line], steps: Steps) -> list[Process]:
    """The trainer first. `updates`: weight updates as plain data. Raises `NothingToDraw`."""
    if not (root / FILE).exists():
        raise NothingToDraw(f"{root} has no {FILE}: it is no run's folder, or no step of the run has ended yet")
    lines = read_timeline(root / FILE)
    processes = [
        _trainer(lines, read_lines(root / "metrics.jsonl"), steps),
        Process("evaluation", _plain(lines, EVALUATION, steps), "evaluation"),
        *_servers(updates, steps),
        *_workers(root / "trajectories", steps),
    ]
    found = [process for process in processes if process.slices]
    if not found:
        raise NothingToDraw(f"{root} has nothing of these steps; there are {_known(lines)}")
    return found


def _trainer(lines: Sequence[Line], metrics: Sequence[dict[str, Any]], steps: Steps) -> Process:
    drawn = [*_steps(lines, steps), *_plain(lines, PUBLISH, steps), *_plain(lines, CHECKPOINT, steps)]
    ends = {line["number"]: line["at_unix_s"] for line in lines if line["name"] == "record"}
    rows = [row for row in last_by_step(metrics) if row["step"] in steps and row["step"] in ends]
    counters = {name: [(ends[row["step"]], row[name]) for row in rows if name in row] for name in COUNTERS}
    return Process("trainer", drawn, "trainer", counters)


def _steps(lines: Sequence[Line], steps: Steps) -> Iterator[Slice]:
    """A step begins with its wait. One that was trained again after a crash is there twice."""
    phases: list[Line] = []
    for line in (*(line for line in lines if line["track"] == STEPS), {"name": "wait", "number": None}):
        if phases and (line["name"] == "wait" or line["number"] != phases[0]["number"]):
            if phases[0]["number"] in steps:
                yield _step(phases)
            phases = []
        phases.append(line)


def _step(phases: Sequence[Line]) -> Slice:
    children = [_slice(line, line["name"]) for line in phases]
    start, end = min(one.start_s for one in children), max(one.end_s for one in children)
    number = phases[0]["number"]
    return Slice(f"step {number}", start, end, {"step": number}, children)


def _plain(lines: Sequence[Line], track: str, steps: Steps) -> list[Slice]:
    chosen = [line for line in lines if line["track"] == track and steps.version(line["number"])]
    return [_slice(line, f"{line['name']} version {line['number']}") for line in chosen]


def _slice(line: Line, name: str) -> Slice:
    return Slice(name, line["at_unix_s"], line["at_unix_s"] + line["s"])


def _servers(updates: Sequence[Line], steps: Steps) -> list[Process]:
    by_server: dict[str, list[Slice]] = defaultdict(list)
    for update in updates:
        if steps.version(update["version"]) and update.get("at_unix_s"):
            by_server[update["server_id"]].append(_swap(update))
    return [Process(name, by_server[name], "weights") for name in sorted(by_server)]


def _swap(update: Line) -> Slice:
    """Fetched while tokens are sampled, then a pause with the load in it, at the end of which it was reported."""
    end = update["at_unix_s"]
    paused = end - update["pause_s"]
    load = Slice("load", end - min(update["load_s"], update["pause_s"]), end)
    facts = {"requests in flight": update["in_flight"]}
    parts = [Slice("fetch", paused - update["fetch_s"], paused), Slice("pause", paused, end, facts, [load])]
    version = {"version": update["version"]}
    return Slice(f"swap to version {update['version']}", parts[0].start_s, end, version, parts)


def _workers(folder: Path, steps: Steps) -> list[Process]:
    by_worker: dict[str, list[Slice]] = defaultdict(list)
    for path in sorted(folder.glob("step_*.jsonl")):
        step = int(path.stem.removeprefix("step_"))
        for record in read_lines(path) if step in steps else ():
            if (drawn := episode_slice(record, step)) is not None:
                by_worker[str(record["extra"].get("worker", "agents"))].append(drawn)
    return [Process(name, by_worker[name], "episodes") for name in sorted(by_worker)]


def _known(lines: Sequence[Line]) -> str:
    numbers = [line["number"] for line in lines if line["track"] == STEPS]
    return f"steps {min(numbers)} to {max(numbers)}" if numbers else "no steps"
