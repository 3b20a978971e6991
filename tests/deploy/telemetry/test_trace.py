"""`penstock trace`: slices become lanes, and a run's folder a valid file that holds what happened."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.telemetry.trace_format import check
from typer.testing import CliRunner, Result

from penstock.deploy import RunConnection, app
from penstock.deploy.telemetry.trace import TraceProcess, TraceSlice, chrome_trace, lanes
from penstock.transfer_queue import Limits, RedisServer, WeightUpdate


def names(lane: list[TraceSlice]) -> list[str]:
    return [one.name for one in lane]


def test_slices_that_overlap_get_lanes_and_children_stay_in_their_parent() -> None:
    found = lanes([TraceSlice("a", 0, 2), TraceSlice("b", 1, 3), TraceSlice("c", 2, 4), TraceSlice("d", 3, 5)])
    assert [names(lane) for lane in found] == [["a", "c"], ["b", "d"]]
    tools = [TraceSlice("tool x", 1, 3), TraceSlice("tool y", 1, 2), TraceSlice("tool z", 2, 4)]
    ((episode,), (first, second)) = lanes([TraceSlice("episode", 0, 5, children=tools)])
    assert (names(episode.children), first.name, second.name) == (["tool x"], "tool y", "tool z")
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


BEGAN = 1_700_000_000.0


def line(track: str, name: str, number: int, at_s: float, s: float) -> dict[str, Any]:
    return {"track": track, "name": name, "number": number, "at_unix_s": BEGAN + at_s, "s": s}


def step_lines(number: int, at_s: float) -> list[dict[str, Any]]:
    lines = []
    for name, seconds in zip(PHASES, (1.0, 0.2, 0.1, 0.5, 0.1, 0.1), strict=True):
        lines.append(line("steps", name, number, at_s, seconds))
        at_s += seconds
    return lines


def episode(number: int, at_s: float, worker: str) -> dict[str, Any]:
    trace = [["model", "", 0.0, 0.3], ["tool", "python", 0.3, 0.2], ["tool", "python", 0.3, 0.1],
             ["model", "", 0.5, 0.2], ["reward", "", 0.7, 0.05]]  # fmt: skip
    return {
        "episode_id": f"train/{number:08d}#0",
        "reward": 1.0,
        "outcome": {"kind": "completed", "reason": "", "component": ""},
        "num_turns": 2,
        "metrics": {"latency_s": 0.8},
        "extra": {"began_unix_s": BEGAN + at_s, "trace": trace, "worker": worker},
        "segments": [],
    }


UPDATES = [
    {"server_id": "rollout-0", "version": v, "pause_s": 0.02, "fetch_s": 0.1, "load_s": 0.01, "in_flight": 3,
     "at_unix_s": BEGAN + 2.5 * v} for v in (1, 2)
]  # fmt: skip


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run's folder as the trainer and the recorder leave it: two steps, the second trained twice."""
    folder = tmp_path / "runs" / "mine"
    rows = [
        *step_lines(0, 0.0),
        line("publish", "publish", 1, 1.9, 0.4),
        *step_lines(1, 2.1)[:4],  # killed in the middle
        *step_lines(1, 5.0),
        line("checkpoint", "checkpoint", 2, 7.0, 0.6),
        line("evaluation", "evaluation", 1, 2.0, 3.0),
    ]
    write_lines(folder / "timeline.jsonl", rows)
    metrics = [{"step": n, "version": n + 1, "reward": 0.5 + n / 4, "tokens_per_s": 100.0} for n in (0, 1)]
    write_lines(folder / "metrics.jsonl", metrics)
    write_lines(folder / "weight_updates.jsonl", UPDATES)
    write_lines(folder / "trajectories" / "step_000000.jsonl", [episode(0, 0.1, "agent-0"), episode(1, 0.4, "agent-0")])
    old = {**episode(3, 3.0, "agent-1"), "extra": {"worker": "agent-1"}}
    write_lines(folder / "trajectories" / "step_000001.jsonl", [episode(2, 3.0, "agent-1"), old])
    return folder


PHASES = ["wait", "score", "advantages", "update", "announce", "record"]


def invoke(*words: Any) -> Result:
    return CliRunner().invoke(app, ["trace", *map(str, words)])


@pytest.fixture
def trace_of(root: Path, tmp_path: Path):
    def make(*words: str) -> dict[str, Any]:
        out = tmp_path / "out.json"
        result = invoke(root, "--out", out, *words)
        assert result.exit_code == 0, result.output
        return json.loads(out.read_text())

    return make


def test_every_role_has_its_track(trace_of) -> None:
    found = check(trace_of())
    assert list(found) == ["trainer", "evaluation", "rollout-0", "agent-0", "agent-1"]
    steps = [name for name in found["trainer"] if not name.startswith(("publish", "checkpoint"))]
    # The second step was killed after its update, and trained again.
    assert steps == ["step 0", *PHASES, "step 1", *PHASES[:4], "step 1", *PHASES]
    assert [name for name in found["trainer"] if name not in steps] == ["publish version 1", "checkpoint version 2"]
    assert found["evaluation"] == ["evaluation version 1"]
    swap = ["fetch", "pause", "load"]
    assert found["rollout-0"] == ["swap to version 1", *swap, "swap to version 2", *swap]
    # One of the two came from an older recorder, without times.
    assert len([name for name in found["agent-1"] if "#" in name]) == 1


def test_an_episode_is_turns_of_a_model_call_and_what_followed(trace_of) -> None:
    trace = trace_of("--steps", "1:2")
    (worker,) = [e["pid"] for e in trace["traceEvents"] if e["ph"] == "M" and e["args"].get("name") == "agent-1"]
    lane = [
        (e["ph"], e["name"]) for e in trace["traceEvents"] if (e["pid"], e["tid"]) == (worker, 1) and e["ph"] in "BE"
    ]
    assert lane == [
        ("B", "train/00000002#0"),
        *(("B", "turn 0"), ("B", "model"), ("E", "model"), ("B", "tool python"), ("E", "tool python"), ("E", "turn 0")),
        *(("B", "turn 1"), ("B", "model"), ("E", "model"), ("E", "turn 1")),
        *(("B", "reward"), ("E", "reward")),
        ("E", "train/00000002#0"),
    ]
    beside = [e["name"] for e in trace["traceEvents"] if (e["pid"], e["tid"]) == (worker, 2) and e["ph"] == "B"]
    assert beside == ["tool python"]


def test_pauses_have_their_length_and_counters_are_at_the_ends_of_steps(trace_of) -> None:
    events = trace_of()["traceEvents"]
    begin, end = [e for e in events if e["name"] == "pause"][:2]
    assert (end["ts"] - begin["ts"], begin["args"]) == (20_000, {"requests in flight": 3})
    counters = [(e["ts"], e["args"]) for e in events if e["ph"] == "C" and e["name"] == "reward"]
    assert counters == [(1_900_000, {"reward": 0.5}), (6_900_000, {"reward": 0.75})]


def test_steps_bound_the_file(trace_of) -> None:
    found = check(trace_of("--steps", ":1"))
    assert "step 1" not in found["trainer"]
    assert set(found) == {"trainer", "evaluation", "rollout-0", "agent-0"}
    assert [name for name in found["rollout-0"] if "swap" in name] == ["swap to version 1"]


def test_mistakes_are_one_line_with_the_mend(root: Path, tmp_path: Path) -> None:
    for words, message in (
        ((root, "--steps", "3-5"), "write A:B"),
        ((root, "--steps", "90:"), "there are steps 0 to 1"),
        ((tmp_path,), "has no timeline.jsonl"),
    ):
        result = invoke(*words, "--out", tmp_path / "out.json")
        assert (result.exit_code, message in result.output) == (2, True), result.output
        assert not (tmp_path / "out.json").exists()


@pytest.mark.redis
async def test_swaps_of_a_living_run_come_from_its_queue(root: Path, tmp_path: Path) -> None:
    async with RedisServer(tmp_path / "redis", "only-for-this-test") as server:
        link = RunConnection(server.url, "mine", "only-for-this-test", "token")
        queue = await link.connect()
        await queue.create_run(Limits(group_size=2, groups_per_step=1, max_staleness=1), "x")
        await queue.report_update(WeightUpdate("far-away", 1, 0.02, 0.1, 0.01, 5, at_unix_s=BEGAN + 3))
        (root / "connect.env").write_text(link.shell_lines())
        out = tmp_path / "living.json"
        result = await asyncio.to_thread(invoke, root, "--out", out)
        await queue.close()
    assert result.exit_code == 0, result.output
    found = check(json.loads(out.read_text()))
    assert found["far-away"] == ["swap to version 1", "fetch", "pause", "load"]
    assert "rollout-0" not in found


def test_a_queue_that_is_away_costs_the_swaps_alone(root: Path, tmp_path: Path) -> None:
    (root / "connect.env").write_text("export NOTHING=1\n")
    result = invoke("mine", "--runs-dir", root.parent, "--out", tmp_path / "out.json")
    assert result.exit_code == 0
    assert "no weight swaps" in result.output
    assert "rollout-0" in check(json.loads((tmp_path / "out.json").read_text()))
