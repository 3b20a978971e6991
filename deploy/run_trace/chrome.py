"""The JSON trace event format: "B" and "E" events per lane, "C" for counters, "M" for names. Microseconds, from 0.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from penstock.deploy.run_trace.slices import Process, Slice, lanes

Event = dict[str, Any]


def chrome_trace(processes: Sequence[Process]) -> dict[str, Any]:
    """``{"traceEvents": […]}``. The first thing that happens in any process is at 0."""
    starts = [one.start_s for process in processes for one in process.slices]
    zero_s = min(starts, default=0.0)
    events = [event for pid, process in enumerate(processes, start=1) for event in _events(pid, process, zero_s)]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"began_unix_s": zero_s}}


def _events(pid: int, process: Process, zero_s: float) -> Iterator[Event]:
    yield _named("process_name", pid, 0, name=process.name)
    yield _named("process_sort_index", pid, 0, sort_index=pid)
    for tid, lane in enumerate(lanes(process.slices), start=1):
        yield _named("thread_name", pid, tid, name=f"{process.lane} {tid}")
        for one in lane:
            yield from _slice(pid, tid, one, zero_s)
    for name, values in process.counters.items():
        for at_s, value in values:
            yield {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": _us(at_s, zero_s), "args": {name: value}}


def _slice(pid: int, tid: int, one: Slice, zero_s: float) -> Iterator[Event]:
    where = {"name": one.name, "pid": pid, "tid": tid}
    yield {**where, "ph": "B", "ts": _us(one.start_s, zero_s), "args": dict(one.facts)}
    for child in one.children:
        yield from _slice(pid, tid, child, zero_s)
    yield {**where, "ph": "E", "ts": _us(one.end_s, zero_s)}


def _named(kind: str, pid: int, tid: int, **facts: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": facts}


def _us(at_s: float, zero_s: float) -> int:
    return max(0, round((at_s - zero_s) * 1e6))
