"""`agent.sources`: loop, tools and limits of one data source's episodes."""

from __future__ import annotations

import pytest

from penstock.agent_loops import AgentConfig, Episode, LoadError, verify_sources
from penstock.agent_loops.chat import verify_template as real
from penstock.agent_loops.config import SourceConfig
from penstock.agent_loops.sources import services_of
from penstock.testing import FakeClient

CONFIG = AgentConfig(
    loop="tool_agent",
    max_turns=3,
    sources={
        "sums": SourceConfig(loop="single_turn", tools=(), max_new_tokens=8),
        "pro*": SourceConfig(max_turns=7, episode_deadline_s=30.0),
    },
)


@pytest.mark.parametrize(
    ("source", "loop", "turns", "tokens", "deadline_s"),
    [
        ("sums", "single_turn", 3, 8, 120.0),
        ("products", "tool_agent", 7, 256, 30.0),
        ("x", "tool_agent", 3, 256, 120.0),
    ],
)
def test_a_source_has_its_own_where_it_is_set(
    source: str, loop: str, turns: int, tokens: int, deadline_s: float
) -> None:
    found = CONFIG.of_source(source)
    assert (found.loop, found.max_turns, found.max_new_tokens) == (loop, turns, tokens)
    assert found.episode_deadline_s == deadline_s
    assert found.max_response_tokens == CONFIG.max_response_tokens


def test_loops_and_longest_responses_are_those_of_all() -> None:
    config = AgentConfig(sources={"a": SourceConfig(loop="code_act", max_response_tokens=4096), "b": SourceConfig()})
    assert config.loops == ["tool_agent", "code_act"]
    assert config.most_response_tokens == 4096


def test_an_episode_has_the_tools_of_its_source(parts_of, calculator) -> None:
    services = parts_of(None, None, calculator, config=CONFIG)
    assert services_of(services, "sums").tools == services_of(services, "sums").tool_configs == {}
    assert list(services_of(services, "products").tools) == [calculator.name]
    assert services_of(services, "products").config.max_turns == 7
    assert services_of(services, "products").mismatches is services.mismatches


@pytest.mark.parametrize(("source", "turns"), [("sums", 1), ("products", 2)])
async def test_an_episode_runs_as_its_source_has_it(
    parts_of, queue_of, tasks_of, calling_policy, calculator, source: str, turns: int
) -> None:
    queue = queue_of(tasks_of(data_source=source))
    config = CONFIG.model_copy(update={"sources": {"sums": SourceConfig(loop="single_turn", tools=())}})
    services = parts_of(queue, FakeClient(calling_policy()), calculator, config=config)
    (lease,) = await queue.lease_episodes("w", 1, 0)
    await Episode(services, lease).run()
    trajectory = queue.done[lease.task.task_id]
    prompt = services.chat.decode(trajectory.segments[0].prompt_ids.tolist())
    assert (trajectory.num_turns, calculator.name in prompt) == (turns, turns == 2)


def test_a_tool_that_the_recipe_lacks_is_named(parts_of, calculator) -> None:
    config = AgentConfig(sources={"sums": SourceConfig(tools=("calculatr",))})
    services = parts_of(None, None, calculator, config=config)
    with pytest.raises(LoadError, match=rf"agent\.sources\.sums\.tools: no tool 'calculatr'.*{calculator.name}"):
        verify_sources(services.chat, config, services.tools)
    with pytest.raises(LoadError, match="the recipe has no tools"):
        verify_sources(services.chat, config, {})


def test_every_set_of_tools_is_verified(parts_of, calculator, monkeypatch) -> None:
    services, shown = parts_of(None, None, calculator, config=CONFIG), []
    monkeypatch.setattr(
        "penstock.agent_loops.sources.verify_template",
        lambda chat, tools: shown.append(len(tools)) or real(chat, tools),
    )
    assert verify_sources(services.chat, CONFIG, services.tools).conversations > 0
    assert sorted(shown) == [0, 1]
