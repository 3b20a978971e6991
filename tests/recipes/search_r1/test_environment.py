"""Search-R1's environment without a model, on a real search server over the recipe's corpus."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.recipes.conftest import played

pytestmark = [pytest.mark.deep, pytest.mark.recipes, pytest.mark.bwrap, pytest.mark.torch]


@pytest.fixture
def overrides(search_r1: Path, searching: Callable[[], str]) -> tuple[str, ...]:
    return (
        f"model={search_r1 / 'base'}",
        f"data.train={search_r1 / 'train.parquet'}",
        f"data.eval={search_r1 / 'eval.parquet'}",
        searching(),
    )


@pytest.mark.parametrize("split", ["train", "eval"])
async def test_the_oracle_finds_every_answer(split: str, overrides: tuple[str, ...]) -> None:
    found = await played("search_r1/cpu.yaml", "oracle", *overrides, split=split)
    missed = [one.task_id for one in found.trajectories if one.reward != 1.0]
    assert (missed, found.failures) == ([], [])
    assert len(found.trajectories) == {"train": 96, "eval": 24}[split]
    searches = [one.metrics["tool_calls"] for one in found.trajectories]
    assert set(searches) == {1.0, 2.0}, "some questions need two articles"
    assert all(one.metrics["reward/f1"] == 1.0 for one in found.trajectories)


@pytest.mark.parametrize(("policy", "answered"), [("null", 1.0), ("reader", 0.0)])
async def test_who_does_not_answer_earns_nothing(policy: str, answered: float, overrides: tuple[str, ...]) -> None:
    found = await played("search_r1/cpu.yaml", policy, *overrides)
    assert (set(found.rewards), found.failures) == ({0.0}, [])
    assert {one.metrics["reward/answered"] for one in found.trajectories} == {answered}


async def test_f1_is_one_setting_away(overrides: tuple[str, ...]) -> None:
    found = await played("search_r1/cpu.yaml", "oracle", *overrides, "agent.rewards.settings.metric=f1", rows=8)
    assert found.rewards == [1.0] * 8


async def test_a_server_that_is_away_is_no_zero(overrides: tuple[str, ...]) -> None:
    """The environment's failure, told with its cause; no episode of it carries a reward."""
    tool = "tools=[{name: search, retries: 0, settings: {url: 'http://127.0.0.1:9/retrieve'}}]"
    found = await played("search_r1/cpu.yaml", "oracle", *overrides, tool, rows=3)
    assert found.trajectories == []
    assert {letter.outcome.component for letter in found.failures} == {"search"}
