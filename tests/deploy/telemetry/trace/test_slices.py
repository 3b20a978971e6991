"""Intervals become lanes: nothing is lost, nothing overlaps, what nests stays nested."""

from __future__ import annotations

import random

from tests.deploy.telemetry.trace.checked import check

from penstock.deploy.telemetry.trace import TraceProcess, TraceSlice, chrome_trace, lanes


def names(lane: list[TraceSlice]) -> list[str]:
    return [one.name for one in lane]


def test_what_overlaps_goes_to_another_lane() -> None:
    found = lanes([TraceSlice("a", 0, 2), TraceSlice("b", 1, 3), TraceSlice("c", 2, 4), TraceSlice("d", 3, 5)])
    assert [names(lane) for lane in found] == [["a", "c"], ["b", "d"]]


def test_trace_children_nest_and_parallel_ones_get_a_lane() -> None:
    tools = [TraceSlice("tool x", 1, 3), TraceSlice("tool y", 1, 2), TraceSlice("tool z", 2, 4)]
    ((episode,), (first, second)) = lanes([TraceSlice("episode", 0, 5, children=tools)])
    assert names(episode.children) == ["tool x"]
    assert (first.name, second.name) == ("tool y", "tool z")


def test_a_child_is_cut_to_its_parent() -> None:
    ((one,),) = lanes([TraceSlice("swap", 1, 2, children=[TraceSlice("fetch", 0, 1.5), TraceSlice("pause", 1.5, 9)])])
    assert [(child.start_s, child.end_s) for child in one.children] == [(1, 1.5), (1.5, 2)]


def test_any_slices_make_a_valid_trace_and_none_is_lost() -> None:
    chance = random.Random(7)

    def some(depth: int, start: float, end: float) -> list[TraceSlice]:
        made = []
        for number in range(chance.randint(0, 5)):
            one, other = sorted((chance.uniform(start, end), chance.uniform(start, end)))
            made.append(
                TraceSlice(f"{depth}/{number}", one, other, children=some(depth - 1, one, other) if depth else [])
            )
        return made

    def count(slices: list[TraceSlice]) -> int:
        return sum(1 + count(list(one.children)) for one in slices)

    for _ in range(60):
        made = some(3, 1.7e9, 1.7e9 + 100)
        found = check(chrome_trace([TraceProcess("role", made)]))
        assert len(found.get("role", [])) == count(made)
