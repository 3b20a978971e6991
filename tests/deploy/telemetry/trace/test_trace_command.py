"""`penstock trace` on a run's folder: a valid file that holds what happened."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.telemetry.trace.checked import check
from typer.testing import CliRunner, Result

from penstock.deploy import RunConnection, app
from penstock.transfer_queue import Limits, RedisServer, WeightUpdate

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
    for words, said in (
        ((root, "--steps", "3-5"), "write A:B"),
        ((root, "--steps", "90:"), "there are steps 0 to 1"),
        (("nothing", "--runs-dir", tmp_path), "no such run"),
        ((tmp_path,), "has no timeline.jsonl"),
    ):
        result = invoke(*words, "--out", tmp_path / "out.json")
        assert (result.exit_code, said in result.output) == (2, True), result.output
        assert not (tmp_path / "out.json").exists()


@pytest.mark.redis
async def test_swaps_of_a_living_run_come_from_its_queue(root: Path, tmp_path: Path) -> None:
    began = json.loads((root / "timeline.jsonl").read_text().splitlines()[0])["at_unix_s"]
    async with RedisServer(tmp_path / "redis", "only-for-this-test") as server:
        link = RunConnection(server.url, "mine", "only-for-this-test", "token")
        queue = await link.connect()
        await queue.create_run(Limits(group_size=2, groups_per_step=1, max_staleness=1), "x")
        await queue.report_update(WeightUpdate("far-away", 1, 0.02, 0.1, 0.01, 5, at_unix_s=began + 3))
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
