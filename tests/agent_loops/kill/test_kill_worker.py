"""kill -9 of an agent worker in the middle of tool calls: another worker resumes, and no call is run twice."""

from __future__ import annotations

import asyncio
import json
import shutil

import pytest
from tests.agent_loops.kill.conftest import stop
from tests.agent_loops.kill.gated_sandbox import HELD
from tests.until import until

from penstock.transfer_queue import JournalKind

pytestmark = [
    pytest.mark.redis,
    pytest.mark.crash,
    pytest.mark.bwrap,
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap"),
]


def python(code: str) -> str:
    call = json.dumps({"name": "python", "arguments": {"code": code}})
    return f"<tool_call>\n{call}\n</tool_call>"


def effect(number: int) -> str:
    return f"open('log', 'a').write('{number};')"


FIRST, SECOND, LAST = effect(1), f"{effect(2)} {HELD}", "print(open('log').read())"
LINES = [python(FIRST), python(SECOND), python(LAST), "The answer is 46."]
"""Two calls with an effect in the box, the second held in the middle, and one that tells the effects."""
OUTPUT = "1;2;"


async def kill_in_mid_tool(stage, boxes, episodes, **given):
    """A worker that died with every episode in its second call; nobody was told of any of these."""
    await stage.submit(episodes)
    given = {"episodes": episodes, "lines": LINES, "sandbox_url": boxes.url, **given}
    first = stage.worker("first", **given)
    await until(lambda: boxes.sandbox.held == episodes or first.poll() is not None)
    assert boxes.sandbox.held == episodes
    first.kill()
    first.wait()
    return given


@pytest.mark.parametrize("episodes", [4, pytest.param(200, marks=pytest.mark.deep)])
async def test_kill_in_tool_call_runs_no_call_twice(stage, boxes_of, episodes):
    async with boxes_of(episodes) as boxes:
        given = await kill_in_mid_tool(stage, boxes, episodes)
        second = stage.worker("second", **given)
        if episodes > 4:
            await asyncio.sleep(1.0)  # so that some calls end before they are asked for again, others after
        boxes.sandbox.open.set()
        trajectories = await stage.finished(episodes)
        await until(lambda: not boxes.server.sessions.entries)
        stop(second)
        executed = boxes.sandbox.executed
    assert len(trajectories) == episodes
    assert {one.extra["worker"] for one in trajectories} == {"second"}
    assert {one.extra["tool_results"][2] for one in trajectories} == {OUTPUT}
    assert {(one.extra["replayed_calls"], one.extra["replayed_tool_turns"]) for one in trajectories} == {(2, 1)}
    assert {one.metrics["restarts"] for one in trajectories} == {0}
    assert set(executed.values()) == {1}
    assert len({session for session, _ in executed}) == episodes


@pytest.mark.deep
@pytest.mark.parametrize("on_lost", ["replay", "restart"])
async def test_lost_box_is_replaced_by_on_lost(stage, boxes_of, on_lost):
    async with boxes_of(4) as boxes:
        given = await kill_in_mid_tool(stage, boxes, 4, on_lost=on_lost)
        gone = set(boxes.server.sessions.entries)
        boxes.sandbox.open.set()
        for entry in list(boxes.server.sessions.entries.values()):
            await boxes.server.sessions.end(entry)
        second = stage.worker("second", **given)
        trajectories = await stage.finished(4)
        await until(lambda: not boxes.server.sessions.entries)
        stop(second)
        executed = boxes.sandbox.executed
    assert {one.extra["tool_results"][2] for one in trajectories} == {OUTPUT}
    assert {one.metrics["restarts"] for one in trajectories} == {float(on_lost == "restart")}
    fresh = {session for session, _ in executed} - gone
    assert len(fresh) == 4
    assert {times for (session, _), times in executed.items() if session in fresh} == {1}


@pytest.mark.deep
async def test_unneeded_box_is_ended_by_the_next_worker(stage, boxes_of, tmp_path):
    """Killed during the last model call: no tool is called again, yet the sessions must not stay."""
    hold = tmp_path / "hold"
    hold.touch()
    lines = [python(FIRST), "The answer is 46."]
    async with boxes_of(4) as boxes:
        await stage.submit(4)
        given = {"episodes": 4, "lines": lines, "sandbox_url": boxes.url}
        first = stage.worker("first", hold=str(hold), **given)
        await stage.journaled(4, JournalKind.TOOLS)
        first.kill()
        first.wait()
        assert len(boxes.server.sessions.entries) == 4
        second = stage.worker("second", **given)
        trajectories = await stage.finished(4)
        await until(lambda: not boxes.server.sessions.entries)
        stop(second)
    assert {one.extra["replayed_tool_turns"] for one in trajectories} == {1}
    assert set(boxes.sandbox.executed.values()) == {1}


@pytest.mark.deep
async def test_drained_worker_leaves_its_boxes(stage, boxes_of):
    async with boxes_of(4) as boxes:
        await stage.submit(4)
        given = {"episodes": 4, "lines": LINES, "sandbox_url": boxes.url}
        first = stage.worker("first", **given)
        await until(lambda: boxes.sandbox.held == 4)
        stop(first)
        assert len(boxes.server.sessions.entries) == 4
        assert (await stage.queue.status()).episodes["leased"] == 0
        boxes.sandbox.open.set()
        second = stage.worker("second", **given)
        trajectories = await stage.finished(4)
        await until(lambda: not boxes.server.sessions.entries)
        stop(second)
    assert {one.extra["tool_results"][2] for one in trajectories} == {OUTPUT}
    assert set(boxes.sandbox.executed.values()) == {1}
