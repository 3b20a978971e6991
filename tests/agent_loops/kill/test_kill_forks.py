"""kill -9 of agent workers while episodes are forked: branches stay exact, each is counted once, and no box is left."""

from __future__ import annotations

import asyncio
import re
import shutil

import pytest
from tests.agent_loops.kill.conftest import stop
from tests.agent_loops.kill.test_kill_worker import python
from tests.agent_loops.kill.worker_process import UNIQUE
from tests.until import until

from penstock.transfer_queue import JournalKind, Origin

pytestmark = [
    pytest.mark.redis,
    pytest.mark.crash,
    pytest.mark.bwrap,
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap"),
]
NOTE = python(f"open('log', 'a').write('{UNIQUE};')")
LINES = [NOTE, NOTE, python("print(open('log').read())"), f"The answer is 46, {UNIQUE}."]
"""Two calls with an effect in the box, which no other answer has, and one that tells the effects."""
EPISODES, BRANCHES = 8, 3


@pytest.mark.parametrize("kills", [1, pytest.param(5, marks=pytest.mark.deep)])
async def test_kill_while_forking_loses_and_repeats_no_branch(stage, boxes_of, kills):
    async with boxes_of(EPISODES) as boxes:
        await stage.submit(EPISODES, branches=BRANCHES)
        setup = {"episodes": EPISODES, "lines": LINES, "sandbox_url": boxes.url}
        setup["forks"] = {"branches": BRANCHES, "turn": "random"}
        for number in range(kills):
            worker = stage.worker(f"killed-{number}", **setup)
            seen = len(boxes.sandbox.executed)
            while len(boxes.sandbox.executed) == seen and len(await stage.queue.held()) < EPISODES:
                await asyncio.sleep(0.02)
            worker.kill()
            worker.wait()
        last = stage.worker("last", **setup)
        trajectories = {one.episode_id: one for one in await stage.finished(EPISODES)}
        await until(lambda: not boxes.server.sessions.entries)
        stop(last)
        executed = boxes.sandbox.executed
    assert len(trajectories) == EPISODES
    assert set(executed.values()) == {1}, "no call ran twice in one box"
    origins = {name: Origin(**one.extra["origin"]) for name, one in trajectories.items() if "origin" in one.extra}
    assert len(origins) == EPISODES * BRANCHES // (BRANCHES + 1)
    for name, origin in origins.items():
        (branch,), (parent,) = trajectories[name].segments, trajectories[origin.parent].segments
        place = int(parent.turn_starts[origin.turn])
        assert branch.response_ids[:place].tolist() == parent.response_ids[:place].tolist()
        assert branch.response_logprobs[:place].tolist() == parent.response_logprobs[:place].tolist()
    logs = [re.findall("[0-9a-f]{8}", one.extra["tool_results"][2]) for one in trajectories.values()]
    assert {len(log) for log in logs} == {2}, "each box has seen the calls of its own episode, shared ones included"
    status = await stage.queue.status()
    assert (status.groups["ready"], status.episodes["completed"]) == (EPISODES // 4, EPISODES)
    assert await stage.journaled(0, JournalKind.SAMPLED) == {}
