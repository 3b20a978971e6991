"""Search-R1's environment without a model, on a real search server over the recipe's corpus."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.recipes.conftest import played, script

from penstock.agent_loops.chat import load_tokenizer
from penstock.trainer import load_rows

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


@pytest.fixture
def of_two_hops(two_hops: Path, searching: Callable[..., str]) -> tuple[str, ...]:
    return (
        f"model={two_hops / 'base'}",
        f"data.train={two_hops / 'train.parquet'}",
        f"data.eval={two_hops / 'eval.parquet'}",
        searching(topk=1),
    )


async def test_two_searches_read_what_is_shown(two_hops: Path, of_two_hops: tuple[str, ...]) -> None:
    """Each search finds its article, written as the cold start writes passages, in few tokens."""
    data, tokenizer = script("search_r1/data.py"), load_tokenizer(str(two_hops / "base"))
    found = await played("search_r1/learn.yaml", "oracle", *of_two_hops)
    assert (set(found.rewards), found.failures) == ({1.0}, [])
    rows, texts = list(load_rows(two_hops / "train.parquet")), data.corpus_texts()
    for row, one in zip(rows, found.trajectories, strict=True):
        (segment,) = one.segments
        read = tokenizer.decode(segment.response_ids)
        assert [title for title in row.extra_info["articles"] if data.passage(title, texts[title]) not in read] == []
        assert segment.num_turns == 3
        assert len(segment.prompt_ids) <= 48
        assert len(segment.response_ids) <= 256


async def test_one_search_of_two_earns_nothing(of_two_hops: tuple[str, ...]) -> None:
    for split in ("train", "eval"):
        found = await played("search_r1/learn.yaml", "one_search", *of_two_hops, split=split)
        assert (set(found.rewards), found.failures) == ({0.0}, [])
