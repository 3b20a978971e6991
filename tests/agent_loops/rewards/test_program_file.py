"""The reward that a program wrote down itself."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from penstock.agent_loops import EpisodeJournal, InfraFailure
from penstock.agent_loops.config import RewardChoice
from penstock.agent_loops.rewards import Answer
from penstock.agent_loops.rewards.registry import RewardFunction, Score, make_reward
from penstock.transfer_queue import Task


def extra_of(text: str | None) -> dict[str, Any]:
    files = {} if text is None else {"~/reward.json": text}
    return {"program": {"exit_code": 1, "stderr": "it broke", "files": files, "collect": ["~/reward.json"]}}


async def score(extra: dict[str, Any]) -> Any:
    reward = make_reward(RewardChoice(name="program_file"), Path(), None)
    return await reward.score(Answer("x", "", "", extra))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.5", {"score": 0.5}),
        ('{"reward": 1, "metrics": [1]}', {"score": 1.0}),
        ('{"reward": 1, "metrics": {"right": true, "why": "x", "far": NaN}}', {"score": 1.0, "right": 1.0}),
    ],
)
async def test_a_number_or_json(text: str, expected: dict[str, float]) -> None:
    assert await score(extra_of(text)) == expected


@pytest.mark.parametrize(
    ("extra", "named"),
    [({}, "agent.loop: command"), ({"program": {"files": {}, "collect": ["~/other"]}}, "agent.settings.collect")],
)
async def test_a_recipe_that_cannot_have_the_file_is_a_failure(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(InfraFailure, match=named):
        await score(extra)


@pytest.mark.parametrize("text", [None, "", "NaN", "1" + 400 * "0", "true", 100_000 * "[", '{"reward": "one"}', "{}"])
async def test_a_program_that_leaves_no_reward_earns_nothing(text: str | None, tasks_of) -> None:
    """The policy's code ran beside it; but until a reward came `file` may be wrong, which must not train on zeros."""
    reward = RewardFunction(make_reward(RewardChoice(name="program_file"), Path(), None))
    task, other = (dataclasses.replace(tasks_of()[0], data_source=name) for name in ("mine", "another"))
    with pytest.raises(InfraFailure, match=r"no finite number in ~/reward.json \(exit status 1, it broke\)"):
        await reward.score(task, "", extra_of(text))
    assert (await reward.score(task, "", extra_of("1"))).reward == 1.0
    assert await reward.score(task, "", extra_of(text)) == Score(0.0, {"reward/no_reward": 1.0})
    with pytest.raises(InfraFailure, match="the recipe may be wrong"):
        await reward.score(other, "", extra_of(text))


async def test_a_reward_that_one_worker_had_is_proven_for_all_workers_of_the_run(tasks_of, queue_of) -> None:
    """An episode that prevents its own grading in a fresh worker must not be tried again for that."""
    tasks = tasks_of(2)
    queue = queue_of(tasks)
    segments, earned = (), Score(0.0, {"reward/no_reward": 1.0})

    async def scored(settings: str, text: str | None, of: Task) -> Score:
        """Returns what a new worker, which knows of no reward, gives the episode."""
        worker = RewardFunction(make_reward(RewardChoice(name="program_file"), Path(), None), "x", settings=settings)
        return await worker.score_once(of, "", extra_of(text), segments, EpisodeJournal(queue, queue.lease(of)))

    with pytest.raises(InfraFailure, match="the recipe may be wrong"):
        await scored("file", None, tasks[0])
    assert (await scored("file", "1", tasks[0])).reward == 1.0
    assert await scored("file", None, tasks[1]) == earned
    with pytest.raises(InfraFailure, match="the recipe may be wrong"):
        await scored("another file, as of a resumed run", None, tasks[1])
