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
    return {"program": {"exit_code": 1, "stderr": "it broke", "files": files}}


async def score(extra: dict[str, Any]) -> Any:
    reward = make_reward(RewardChoice(name="program_file"), Path(), None)
    return await reward.score(Answer("x", "", "", extra))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.5", {"score": 0.5}),
        ('{"reward": 1, "metrics": {"right": true, "why": "x", "far": NaN}}', {"score": 1.0, "right": 1.0}),
    ],
)
async def test_a_number_or_json(text: str, expected: dict[str, float]) -> None:
    assert await score(told(text)) == expected


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        (told(None), "it broke"),
        (told("NaN"), "finite"),
        (told("1" + 400 * "0"), "finite"),
        (told("true"), "finite"),
        (told(100_000 * "["), "no JSON"),
        (told('{"reward": 1, "metrics": [1]}'), "no object"),
        (told("{"), "no JSON"),
        (told("{}"), "None"),
        ({}, "agent.loop: command"),
    ],
)
async def test_anything_else_is_a_failure_and_never_a_zero(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(InfraFailure, match=named):
        await score(extra)
