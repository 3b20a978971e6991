"""kill -9 of an agent worker between the reward and `complete`: a judge that was paid is not asked again."""

from __future__ import annotations

import itertools

import pytest
from fastapi import FastAPI
from tests.agent_loops.kill.conftest import stop
from tests.tools.conftest import serve  # noqa: F401 - the fixture
from tests.until import until

pytestmark = [pytest.mark.redis, pytest.mark.crash, pytest.mark.deep]
EPISODES = 4


@pytest.fixture
async def judge(serve):
    """(url, scores it has given): each answer has another score."""
    scores, app = [], FastAPI()
    numbers = itertools.count(1)

    @app.post("/v1/chat/completions")
    async def answer(body: dict) -> dict:
        scores.append(next(numbers))
        return {"choices": [{"message": {"role": "assistant", "content": f"SCORE: {scores[-1]}"}}]}

    return f"{await serve(app)}/v1", scores


async def test_killed_before_complete_the_judge_is_asked_once(stage, judge, tmp_path):
    url, scores = judge
    done = tmp_path / "done"
    done.mkdir()
    await stage.submit(EPISODES)
    settings = {"url": url, "model": "m", "key_variable": "", "cache_entries": 0}
    given = {"episodes": EPISODES, "lines": ["The answer is 46."], "reward": "judge", "reward_settings": settings}
    first = stage.worker("first", done=str(done), **given)
    await until(lambda: len(list(done.iterdir())) == EPISODES)
    first.kill()
    first.wait()
    assert sorted(scores) == [1, 2, 3, 4]
    second = stage.worker("second", **given)
    trajectories = await stage.finished(EPISODES)
    stop(second)
    assert {one.extra["worker"] for one in trajectories} == {"second"}
    assert sorted(scores) == [1, 2, 3, 4], "nothing was asked again"
    assert sorted(one.reward for one in trajectories) == [0.1, 0.2, 0.3, 0.4]
    assert sorted(one.metrics["reward/raw"] for one in trajectories) == [1.0, 2.0, 3.0, 4.0]
