"""Async functions with an `AsyncOpenAI` client, run inside a worker's episode: no socket, the same exactness."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from penstock.agent_loops import AgentConfig, Episode, LoadError, find_loop
from penstock.gateway.openai_agent import loop_of
from penstock.testing import FakeClient
from penstock.transfer_queue import Outcome, OutcomeKind

TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}}}]
ROOMY = AgentConfig(max_turns=20, max_response_tokens=5000)


@pytest.fixture
def run(queue_of, tasks_of, parts_of, calling_policy):
    """One lease of one task; hand in `queue` again for the next worker's lease."""

    async def go(agent, client=None, queue=None, **fields):
        queue = queue or queue_of(tasks_of())
        parts = parts_of(queue, client or FakeClient(calling_policy()), **{"config": ROOMY, **fields})
        parts = dataclasses.replace(parts, find_loop=lambda name: loop_of(agent, "agent"))
        outcome = await Episode(parts, queue.lease(tasks_of()[0])).run()
        return outcome, queue.done.get("train/00000000"), queue

    return go


async def ask(client, messages, **fields):
    return await client.chat.completions.create(model="policy", messages=messages, **fields)


async def uses_tools(client, task):
    messages = list(task.messages)
    while True:
        message = (await ask(client, messages, tools=TOOLS)).choices[0].message
        messages.append(message.model_dump())
        if not message.tool_calls:
            return float(task.ground_truth in message.content)
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "46"} for call in message.tool_calls]


async def test_an_agent_with_tools_is_one_segment_token_for_token(run, chat_for, calling_policy):
    client = FakeClient(calling_policy(turns=2))
    outcome, trajectory, _ = await run(uses_tools, client)
    (segment,) = trajectory.segments
    whole = [*segment.prompt_ids.tolist(), *segment.response_ids.tolist()]
    assert [whole[: len(request.token_ids)] for request in client.requests] == [r.token_ids for r in client.requests]
    assert "<tool_response>\n46\n</tool_response>" in chat_for().decode(segment.response_ids)
    assert (outcome.kind, trajectory.reward, trajectory.num_turns) == (OutcomeKind.COMPLETED, 1.0, 3)
    assert trajectory.metrics["calls"] == 3
    assert trajectory.metrics["tool_calls"] == 2
    assert trajectory.metrics["token_mismatches"] == 0


async def test_streams_and_the_responses_api_are_recorded_too(run, calling_policy):
    heard = []

    async def agent(client, task):
        async with client.chat.completions.stream(model="policy", messages=list(task.messages)) as events:
            heard.append((await events.get_final_completion()).choices[0].message.content)
        heard.append((await client.responses.create(model="policy", input="What is 12+34?")).output_text)
        heard.append([model.id async for model in client.models.list()])

    _, trajectory, _ = await run(agent, FakeClient(calling_policy(turns=0)))
    assert heard == ["The answer is 46.", "The answer is 46.", ["policy"]]
    assert trajectory.num_turns == 2
    assert trajectory.reward == 1.0  # of the run's reward function: the agent gave none


async def test_the_same_question_twice_is_two_samples(run):
    answers = iter([[5, 2], [6, 2]])

    async def agent(client, task):
        for _ in range(2):
            await ask(client, list(task.messages))
        return 1.0

    _, trajectory, _ = await run(agent, FakeClient(lambda context: next(answers)))
    assert [segment.response_ids.tolist() for segment in trajectory.segments] == [[5, 2], [6, 2]]


async def test_an_agent_that_asks_otherwise_the_second_time_starts_afresh(run, queue_of, tasks_of):
    queue, runs = queue_of(tasks_of()), []
    answers = iter([[5, 2], [6, 2], [7, 2]])

    async def fickle(client, task):
        runs.append(1)
        await ask(client, [{"role": "user", "content": f"try {len(runs)}"}])
        if len(runs) == 1:
            raise asyncio.CancelledError
        return 1.0

    client = FakeClient(lambda context: next(answers))
    with pytest.raises(asyncio.CancelledError):
        await run(fickle, client, queue)
    _, trajectory, _ = await run(fickle, client, queue)
    assert trajectory.metrics["restarts"] == 1
    assert [segment.response_ids.tolist() for segment in trajectory.segments] == [[7, 2]]


async def test_our_failure_ends_the_episode_also_where_the_agent_swallows_it(run):
    def broken(context):
        raise OSError("no server")

    async def stubborn(client, task):
        with pytest.raises(openai.InternalServerError):
            await ask(client, list(task.messages))
        return 1.0

    async def streams(client, task):
        with pytest.raises(openai.APIError):
            await ask(client, list(task.messages), stream=True)
        return 1.0

    for agent in (stubborn, streams):
        outcome, trajectory, _ = await run(agent, FakeClient(broken))
        assert (outcome.kind, outcome.component, trajectory) == (OutcomeKind.INFRA_ERROR, "rollout", None)
        assert "no server" in outcome.reason


async def test_a_wrong_request_is_the_agents_bug_and_names_the_field(run):
    async def agent(client, task):
        await ask(client, list(task.messages), logit_bias={"1": 5})

    outcome, _, _ = await run(agent)
    assert (outcome.kind, outcome.component) == (OutcomeKind.INFRA_ERROR, "loop")
    assert "logit_bias" in outcome.reason


async def test_the_deadline_keeps_what_was_answered(run, calling_policy):
    async def slow(client, task):
        await ask(client, list(task.messages))
        await asyncio.sleep(60)

    config = AgentConfig(episode_deadline_s=10.0, max_response_tokens=1000)
    outcome, trajectory, _ = await run(slow, FakeClient(calling_policy(turns=0)), config=config)
    assert outcome == Outcome(OutcomeKind.TRUNCATED, "deadline")
    assert trajectory.num_turns == 1


@pytest.mark.parametrize("returned", ["1.0", float("nan"), object()])
async def test_what_is_no_reward_is_refused(run, calling_policy, returned):
    async def agent(client, task):
        await ask(client, list(task.messages))
        return returned

    outcome, _, _ = await run(agent, FakeClient(calling_policy(turns=0)))
    assert re.search(rf"finite number.*{Path(__file__).name}, line {agent.__code__.co_firstlineno}\)$", outcome.reason)


def test_a_functions_path_is_a_loop(tmp_path):
    (tmp_path / "mine.py").write_text("async def solve(client, task): ...\nasync def wrong(client): ...\n")
    assert find_loop("mine.py:solve", tmp_path).__name__ == "solve"
    with pytest.raises(LoadError, match=r"must take \(client, task\)"):
        find_loop("mine.py:wrong", tmp_path)


def test_without_the_package_the_message_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "mine2.py").write_text("async def solve(client, task): ...\n")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "openai" else object())
    from penstock.gateway import OpenAIAgentLoop

    with pytest.raises(LoadError, match=r"pip install 'penstock\[openai\]'"):
        OpenAIAgentLoop.require()


def test_the_package_is_loaded_only_where_an_agent_runs():
    code = "import sys, penstock.agent_loops.loops; assert not {'openai', 'httpx2'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("kept", [[1], [2, 0], [2, 1, 0], [1, 0, 2, 3]])
async def test_answers_of_sub_agents_are_found_again_in_whatever_order_they_were_journaled(
    run, calling_policy, queue_of, tasks_of, kept
):
    async def agent(client, task):
        await asyncio.gather(*(ask(client, [{"role": "user", "content": f"part {i}"}]) for i in range(3)))
        await ask(client, list(task.messages))
        return 1.0

    client, queue = FakeClient(calling_policy(turns=0)), queue_of(tasks_of())
    await run(agent, client, queue)
    entries = queue.journals["train/00000000"]
    queue.rewind("train/00000000", [entries[at] for at in kept])
    asked = len(client.requests)
    _, trajectory, _ = await run(agent, client, queue)
    assert len(client.requests) - asked == 4 - len(kept)
    assert (trajectory.num_turns, trajectory.metrics["restarts"]) == (4, 0)
    assert trajectory.extra["replayed_calls"] == len(kept)


async def test_a_request_that_the_agent_gives_up_is_no_failure_and_no_turn(run, chat_for):
    class Slow(FakeClient):
        async def generate(self, request):
            if "slowly" in chat_for().decode(request.token_ids):
                await asyncio.sleep(60)
            return await super().generate(request)

    async def hasty(client, task):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask(client, [{"role": "user", "content": "slowly"}]), 0.05)
        await ask(client, list(task.messages))
        return 1.0

    outcome, trajectory, _ = await run(hasty, Slow(lambda context: [5, 2]))
    assert (outcome.kind, trajectory.num_turns, len(trajectory.segments)) == (OutcomeKind.COMPLETED, 1, 1)
