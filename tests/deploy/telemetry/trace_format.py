"""What the trace event format asks of a file."""

from __future__ import annotations

from collections import defaultdict
from typing import Any


def check(trace: dict[str, Any]) -> dict[str, list[str]]:
    """Every B has its E, time never goes back on a track, everything has a name. Returns process → its slices' names
    in the order of their starts."""
    names: dict[int, str] = {}
    open_slices: dict[tuple[int, int], list[str]] = defaultdict(list)
    newest: dict[tuple[int, int], int] = defaultdict(int)
    found: dict[str, list[tuple[int, str]]] = defaultdict(list)
    lanes_named = set()
    for event in trace["traceEvents"]:
        kind, track = event["ph"], (event["pid"], event["tid"])
        assert kind in ("B", "E", "C", "M"), event
        assert event["name"], event
        if kind == "M":
            if event["name"] == "process_name":
                names[event["pid"]] = event["args"]["name"]
            elif event["name"] == "thread_name":
                lanes_named.add(track)
            continue
        assert isinstance(event["ts"], int)
        assert event["ts"] >= 0
        if kind == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
            continue
        assert event["ts"] >= newest[track], f"time goes back on {track}: {event}"
        assert track in lanes_named, f"no name for {track}"
        newest[track] = event["ts"]
        if kind == "B":
            open_slices[track].append(event["name"])
            found[names[event["pid"]]].append((event["ts"], event["name"]))
        else:
            assert open_slices[track].pop() == event["name"], f"an E without its B: {event}"
    assert not any(open_slices.values()), f"never ended: {open_slices}"
    return {process: [name for _, name in sorted(slices, key=lambda one: one[0])] for process, slices in found.items()}
