"""The reward that a program wrote down itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.agent_loops import InfraFailure
from penstock.agent_loops.config import RewardChoice
from penstock.agent_loops.rewards import Answer
from penstock.agent_loops.rewards.registry import make_reward


def told(text: str | None) -> dict[str, Any]:
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
    assert await score(told(text)) == expected


@pytest.mark.parametrize(
    ("extra", "named"),
    [({}, "agent.loop: command"), ({"program": {"files": {}, "collect": ["~/other"]}}, "agent.settings.collect")],
)
async def test_a_recipe_that_cannot_have_the_file_is_a_failure(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(InfraFailure, match=named):
        await score(extra)


@pytest.mark.parametrize("text", [None, "", "NaN", "1" + 400 * "0", "true", 100_000 * "[", '{"reward": "one"}', "{}"])
async def test_a_program_that_leaves_no_reward_earns_nothing(text: str | None) -> None:
    """The policy's code ran beside it, so that it is never a failure of the infrastructure."""
    assert await score(told(text)) == {"score": 0.0, "no_reward": 1.0}
