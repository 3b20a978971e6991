"""A run as a trace for Perfetto or Chrome: slices of time per role, in the JSON trace event format.

    timeline.jsonl ───────────────► trainer: steps with their phases; publish, checkpoint · evaluation
    metrics.jsonl ────────────────► counters of the trainer
    trajectories/step_*.jsonl ────► agent workers: episodes with turns, model and tool calls, reward
    weight_updates.jsonl | queue ─► rollout servers: fetch, pause with load

Slices that overlap without nesting are drawn in separate lanes. Times are each machine's own clock: roles on machines
whose clocks differ are shifted against one another.

Format: "B" and "E" events per lane, "C" for counters, "M" for names, in microseconds from 0
(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.common import last_by, read_jsonl
from penstock.trainer import TIMELINE_FILE, Track


@dataclass(frozen=True, slots=True)
class TraceSlice:
    name: str
    start_s: float
    """Start by a clock that all roles share, such as Unix time."""
    end_s: float
    facts: Mapping[str, Any] = field(default_factory=dict)
    children: Sequence[TraceSlice] = ()
    """Within this one as far as they can be; in any order."""

    def within(self, start_s: float, end_s: float) -> TraceSlice:
        """Cut to these bounds."""
        start = min(max(self.start_s, start_s), end_s)
        return replace(self, start_s=start, end_s=min(max(self.end_s, start), end_s))


@dataclass(frozen=True, slots=True)
class TraceProcess:
    """One role."""

    name: str
    slices: Sequence[TraceSlice]
    lane: str = "lane"
    """Name of a lane."""
    counters: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """name → (seconds, value)"""


def lanes(slices: Iterable[TraceSlice]) -> list[list[TraceSlice]]:
    """Each lane in order and without overlap; so are the children of each slice. Nothing is lost: a child that
    overlaps its neighbour goes to its own lane."""
    tracks: list[list[TraceSlice]] = []
    waiting = [(one.start_s, number, one) for number, one in enumerate(slices)]
    heapq.heapify(waiting)
    number = len(waiting)
    while waiting:
        _, _, one = heapq.heappop(waiting)
        nested, overlapping = _nested(one)
        lane = next((lane for lane in tracks if lane[-1].end_s <= nested.start_s), None)
        if lane is None:
            tracks.append(lane := [])
        lane.append(nested)
        for other in overlapping:  # none starts before `one`: the heap's order holds
            number += 1
            heapq.heappush(waiting, (other.start_s, number, other))
    return tracks


def _nested(one: TraceSlice) -> tuple[TraceSlice, list[TraceSlice]]:
    """The slice with those children, in order, that do not overlap one another; and the others."""
    children: list[TraceSlice] = []
    overlapping: list[TraceSlice] = []
    end_s = one.start_s
    for child in sorted(one.children, key=lambda child: (child.start_s, -child.end_s)):
        cut = child.within(one.start_s, one.end_s)
        if cut.start_s < end_s:
            overlapping.append(cut)
            continue
        inner, more = _nested(cut)
        children.append(inner)
        overlapping += more
        end_s = inner.end_s
    return replace(one, children=children), overlapping


Line = Mapping[str, Any]


class NothingToDraw(Exception):
    """The folder does not belong to a run, or the run left nothing of those steps; the message says which."""


@dataclass(frozen=True, slots=True)
class StepRange:
    """Steps to draw: first ≤ step < end."""

    first: int = 0
    end: int | None = None

    def __contains__(self, step: int) -> bool:
        return self.first <= step and (self.end is None or step < self.end)

    def version(self, version: int) -> bool:
        """Return True if a step of the range made the version, or was trained at it."""
        return version in self or version - 1 in self


def collect(root: Path, updates: Sequence[Line], steps: StepRange) -> list[TraceProcess]:
    """The trainer first. `updates`: weight updates as plain data. Raises `NothingToDraw`."""
    if not (root / TIMELINE_FILE).exists():
        raise NothingToDraw(
            f"{root} has no {TIMELINE_FILE}: it is not the folder of a run, or no step of the run has ended yet"
        )
    lines = read_jsonl(root / TIMELINE_FILE, broken="skip")
    processes = [
        _trainer(lines, read_jsonl(root / "metrics.jsonl"), steps),
        TraceProcess("evaluation", _plain(lines, Track.EVALUATION, steps), "evaluation"),
        *_servers(updates, steps),
        *_workers(root / "trajectories", steps),
    ]
    drawn = [process for process in processes if process.slices]
    if not drawn:
        raise NothingToDraw(f"{root} has nothing of these steps; there are {_known(lines)}")
    return drawn


def _trainer(lines: Sequence[Line], metrics: Sequence[dict[str, Any]], steps: StepRange) -> TraceProcess:
    drawn = [*_steps(lines, steps), *_plain(lines, Track.PUBLISH, steps), *_plain(lines, Track.CHECKPOINT, steps)]
    ends = {line["number"]: line["at_unix_s"] for line in lines if line["name"] == "record"}
    rows = [row for row in last_by(metrics, "step") if row["step"] in steps and row["step"] in ends]
    names = ("reward", "staleness_mean", "tokens_per_s")
    counters = {name: [(ends[row["step"]], row[name]) for row in rows if name in row] for name in names}
    return TraceProcess("trainer", drawn, "trainer", counters)


def _steps(lines: Sequence[Line], steps: StepRange) -> Iterator[TraceSlice]:
    """A step begins with its wait. One that was trained again after a crash is there twice."""
    phases: list[Line] = []
    for line in (*(line for line in lines if line["track"] == Track.STEPS), {"name": "wait", "number": None}):
        if phases and (line["name"] == "wait" or line["number"] != phases[0]["number"]):
            if phases[0]["number"] in steps:
                yield _step(phases)
            phases = []
        phases.append(line)


def _step(phases: Sequence[Line]) -> TraceSlice:
    children = [_slice(line, line["name"]) for line in phases]
    start, end = min(one.start_s for one in children), max(one.end_s for one in children)
    number = phases[0]["number"]
    return TraceSlice(f"step {number}", start, end, {"step": number}, children)


def _plain(lines: Sequence[Line], track: str, steps: StepRange) -> list[TraceSlice]:
    chosen = [line for line in lines if line["track"] == track and steps.version(line["number"])]
    return [_slice(line, f"{line['name']} version {line['number']}") for line in chosen]


def _slice(line: Line, name: str) -> TraceSlice:
    return TraceSlice(name, line["at_unix_s"], line["at_unix_s"] + line["s"])


def _servers(updates: Sequence[Line], steps: StepRange) -> list[TraceProcess]:
    by_server: dict[str, list[TraceSlice]] = defaultdict(list)
    for update in updates:
        version, end = update["version"], update.get("at_unix_s")
        if not steps.version(version) or not end:
            continue
        # Fetched while tokens are sampled, then a pause with the load in it, at the end of which it was reported.
        paused = end - update["pause_s"]
        fetch = TraceSlice("fetch", paused - update["fetch_s"], paused)
        load = TraceSlice("load", end - min(update["load_s"], update["pause_s"]), end)
        pause = TraceSlice("pause", paused, end, {"requests in flight": update["in_flight"]}, [load])
        swap = TraceSlice(f"swap to version {version}", fetch.start_s, end, {"version": version}, [fetch, pause])
        by_server[update["server_id"]].append(swap)
    return [TraceProcess(name, by_server[name], "weights") for name in sorted(by_server)]


def _workers(folder: Path, steps: StepRange) -> list[TraceProcess]:
    by_worker: dict[str, list[TraceSlice]] = defaultdict(list)
    for path in sorted(folder.glob("step_*.jsonl")):
        step = int(path.stem.removeprefix("step_"))
        for record in read_jsonl(path) if step in steps else ():
            if (drawn := episode_slice(record, step)) is not None:
                by_worker[str(record["extra"].get("worker", "agents"))].append(drawn)
    return [TraceProcess(name, by_worker[name], "episodes") for name in sorted(by_worker)]


def _known(lines: Sequence[Line]) -> str:
    numbers = [line["number"] for line in lines if line["track"] == Track.STEPS]
    return f"steps {min(numbers)} to {max(numbers)}" if numbers else "no steps"


MODEL, REWARD = "model", "reward"


def episode_slice(record: Mapping[str, Any], step: int) -> TraceSlice | None:
    """None where the record says nothing about times: an older recorder's, or an OpenAI client's episode."""
    began_s, spans = record["extra"].get("began_unix_s"), record["extra"].get("trace")
    if began_s is None or not spans:
        return None
    parts = sorted((_part(began_s, span) for span in spans), key=lambda part: part.start_s)
    ends = [part.end_s for part in parts]
    end_s = max([*ends, began_s + float(record["metrics"].get("latency_s", 0.0))])
    facts = {"reward": record["reward"], "outcome": record["outcome"]["kind"], "turns": record["num_turns"]}
    children = [*_turns([part for part in parts if part.name != REWARD]), *(p for p in parts if p.name == REWARD)]
    return TraceSlice(record["episode_id"], began_s, end_s, {**facts, "step": step}, children)


def _part(began_s: float, span: Sequence[Any]) -> TraceSlice:
    kind, name, start, seconds = span
    title = f"{kind} {name}" if name else kind
    return TraceSlice(title, began_s + start, began_s + start + seconds)


def _turns(parts: Sequence[TraceSlice]) -> list[TraceSlice]:
    """A turn begins with each model call; what comes before the first one stands by itself."""
    turns: list[list[TraceSlice]] = []
    before: list[TraceSlice] = []
    for part in parts:
        if part.name == MODEL:
            turns.append([part])
        else:
            (turns[-1] if turns else before).append(part)
    ends = [max(part.end_s for part in turn) for turn in turns]
    named = zip(turns, ends, strict=True)
    return [*before, *(TraceSlice(f"turn {n}", turn[0].start_s, end, {}, turn) for n, (turn, end) in enumerate(named))]


Event = dict[str, Any]


def chrome_trace(processes: Sequence[TraceProcess]) -> dict[str, Any]:
    """``{"traceEvents": […]}``. The first thing that happens in any process is at 0."""
    starts = [one.start_s for process in processes for one in process.slices]
    zero_s = min(starts, default=0.0)
    events = [event for pid, process in enumerate(processes, start=1) for event in _events(pid, process, zero_s)]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"began_unix_s": zero_s}}


def _events(pid: int, process: TraceProcess, zero_s: float) -> Iterator[Event]:
    yield _named("process_name", pid, 0, name=process.name)
    yield _named("process_sort_index", pid, 0, sort_index=pid)
    for tid, lane in enumerate(lanes(process.slices), start=1):
        yield _named("thread_name", pid, tid, name=f"{process.lane} {tid}")
        for one in lane:
            yield from _slice_events(pid, tid, one, zero_s)
    for name, values in process.counters.items():
        for at_s, value in values:
            yield {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": _us(at_s, zero_s), "args": {name: value}}


def _slice_events(pid: int, tid: int, one: TraceSlice, zero_s: float) -> Iterator[Event]:
    where = {"name": one.name, "pid": pid, "tid": tid}
    yield {**where, "ph": "B", "ts": _us(one.start_s, zero_s), "args": dict(one.facts)}
    for child in one.children:
        yield from _slice_events(pid, tid, child, zero_s)
    yield {**where, "ph": "E", "ts": _us(one.end_s, zero_s)}


def _named(kind: str, pid: int, tid: int, **facts: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": facts}


def _us(at_s: float, zero_s: float) -> int:
    return max(0, round((at_s - zero_s) * 1e6))
