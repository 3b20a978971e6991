"""Episodes over sidecars that come and go: leased, taken over, finished once, given back when nobody speaks.

Handles name one lease; a key opens one handle.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gateway.conftest import TOOLS, USER, asked, back, call_text, sampled, say

from penstock.agent_loops.rewards import RewardFunction
from penstock.gateway.errors import Conflict, Gone, NoEpisode, NotNow
from penstock.gateway.prefix_tree import hash_of
from penstock.gateway.sessions import BadHandle, SessionManager, episode_key, handle_of, lease_of, opens
from penstock.transfer_queue import COMPLETED, Outcome, OutcomeKind, QueueUnavailable

MORE = {"role": "user", "content": "And 1+1?"}
INFRA = Outcome(OutcomeKind.INFRA_ERROR, "my box died", "agent")


async def test_after_kill_9_the_next_call_goes_on_token_exact(make_bench):
    bench = await make_bench(call_text("1+2"), "It is 3.", "Bye.")
    episode = await bench.open()
    first = await say(episode, tools=TOOLS)
    messages = [USER, back(first), {"role": "tool", "tool_call_id": first.calls[0].call_id, "content": "3"}]
    second = await say(episode, messages, tools=TOOLS)
    again = await bench.restart().find(episode.handle)
    assert again is not episode
    assert again.state() | {"age_s": 0} == episode.state() | {"age_s": 0}
    assert await say(again, messages, tools=TOOLS) == second
    await say(again, [*messages, back(second), MORE], tools=TOOLS)
    fed = bench.client.requests[-1].token_ids
    before = [*bench.client.requests[-2].token_ids, *second.token_ids]
    assert fed[: len(before)] == before
    trajectory = await bench.trajectory(again)
    assert [segment.num_turns for segment in trajectory.segments] == [3]


async def test_a_journal_costs_what_was_said_not_what_was_fed(make_bench):
    bench = await make_bench()
    episode, messages = await bench.open(), [{"role": "user", "content": "word " * 500}]
    for number in range(12):
        choice = await say(episode, messages, tools=TOOLS)
        messages += [back(choice), {"role": "user", "content": f"Question {number}"}]
    said = [sum(map(len, entry.data["bodies"].values())) for entry in await bench.journal(episode)]
    assert said[0] > 2500
    assert max(said[1:]) < 100


async def test_messages_of_a_rewritten_history_are_kept_once(make_bench):
    bench = await make_bench()
    episode, long = await bench.open(), {"role": "user", "content": "word " * 500}
    await say(episode, [long])
    await say(episode, [long, {"role": "assistant", "content": "as I said"}, MORE])
    assert sum(map(len, (await bench.journal(episode))[1].data["bodies"].values())) < 300
    again = await bench.restart().find(episode.handle)
    assert len((await bench.trajectory(again)).segments) == 2


async def test_two_sidecars_may_serve_one_episode(make_bench):
    bench = await make_bench("One.", "Two.", "Three.")
    episode = await bench.open()
    here = bench.manager
    there = SessionManager(bench.parts, 30.0)
    first = await say(episode)
    elsewhere = await there.find(episode.handle)
    second = await say(elsewhere, [USER, back(first), MORE])
    await say(episode, [USER, back(first), MORE, back(second), USER])
    assert len(episode.history.segments) == 1
    await elsewhere.note(reward=0.5)
    ending = await there.finish(episode.handle, None)
    assert (ending.turns, ending.segments, ending.reward) == (3, 1, 0.5)
    with pytest.raises(Gone):
        await say(episode, [USER])
    assert (await here.finish(episode.handle, None)) == ending


async def test_a_choice_that_was_not_journaled_is_sampled_and_the_others_are_not(make_bench):
    bench = await make_bench("A", "B", "C")
    episode = await bench.open()
    journal = bench.queue.journal
    written = []

    async def dies_after_one(lease, entry, position):
        if written:
            raise QueueUnavailable("killed here")
        written.append(entry)
        await journal(lease, entry, position)

    bench.queue.journal = dies_after_one
    with pytest.raises(NotNow):
        await (await episode.answer(asked(n=2))).whole()
    bench.queue.journal = journal
    again = await bench.restart().find(episode.handle)
    call = await again.answer(asked(n=2), retried=True)
    contents = [choice.content for choice in await call.whole()]
    assert len(bench.client.requests) == 3
    assert bench.parts.chat.decode(written[0].ids, special=False) in contents
    trajectory = await bench.trajectory(again)
    assert sorted(bench.parts.chat.decode(sampled(s), special=False) for s in trajectory.segments) == sorted(contents)


async def test_finishing_twice_answers_the_same_also_after_a_restart(make_bench):
    bench = await make_bench("It is 46.")
    episode = await bench.open()
    await say(episode)
    await episode.note(reward=0.25)
    first = await bench.manager.finish(episode.handle, None)
    assert (first.outcome, first.reward, first.turns, first.segments) == ("completed", 0.25, 1, 1)
    assert await bench.manager.finish(episode.handle, None) == first
    assert await bench.restart().finish(episode.handle, None) == first
    for manager in (bench.manager, bench.restart()):
        with pytest.raises(Gone):
            await manager.find(episode.handle)
    assert (await bench.queue.status()).episodes["completed"] == 1


async def test_a_reward_is_durable_and_the_last_one_counts(make_bench):
    bench = await make_bench("A", "B")
    episode = await bench.open()
    first = await say(episode)
    await episode.note(reward=1.0, turn_rewards=None)
    again = await bench.restart().find(episode.handle)
    await say(again, [USER, back(first), MORE])
    await again.note(reward=0.5, turn_rewards=[0.1])
    with pytest.raises(Conflict, match="1 turn_rewards for 2 turns"):
        await bench.manager.finish(episode.handle, None)
    await again.note(reward=0.5, turn_rewards=[0.1, 0.2])
    await bench.manager.finish(episode.handle, None)
    (trajectory,) = await bench.queue.read([episode.lease.episode_id])
    assert (trajectory.reward, list(trajectory.turn_rewards)) == (0.5, [0.1, 0.2])


async def test_reward_is_asked_once_for_one_conversation(make_bench):
    """The sidecar dies between the reward and the queue's `complete`; another one finishes the episode."""
    asked = []

    async def judge(data_source, solution_str, ground_truth, extra_info):
        asked.append(extra_info["segments"])
        return {"score": len(asked) / 10, "raw": len(asked)}

    async def gone(lease, trajectory):
        raise QueueUnavailable("no answer")

    bench = await make_bench("It is 46.", "Sure.", reward=RewardFunction(judge))
    episode, complete = await bench.open(), bench.queue.complete
    await say(episode)
    for _ in range(2):
        bench.queue.complete = gone
        with pytest.raises(NotNow):
            await bench.restart().finish(episode.handle, None)
    assert asked == [["It is 46."]]
    await say(await bench.restart().find(episode.handle), [MORE])
    bench.queue.complete = complete
    ending = await bench.restart().finish(episode.handle, None)
    assert (asked[1:], ending.reward) == ([["It is 46.", "Sure."]], 0.2)
    assert (await bench.queue.read([episode.lease.episode_id]))[0].metrics["reward/raw"] == 2.0


async def test_without_a_reward_the_function_is_asked_and_without_one_it_is_a_conflict(make_bench):
    def score(data_source, solution_str, ground_truth, extra_info):
        return {"score": float(ground_truth in solution_str), "turns": extra_info["num_turns"]}

    bench = await make_bench("It is 46.", reward=RewardFunction(score))
    episode = await bench.open()
    await say(episode)
    assert (await bench.manager.finish(episode.handle, None)).reward == 1.0
    bench = await make_bench("It is 46.")
    episode = await bench.open()
    await say(episode)
    with pytest.raises(Conflict, match=f"POST /episodes/{episode.handle}/reward"):
        await bench.manager.finish(episode.handle, None)
    assert (await say(episode)).content == "It is 46."


@pytest.mark.parametrize("wanted", [None, COMPLETED])
async def test_own_limit_does_not_truncate(make_bench, wanted):
    bench = await make_bench("It is 46.", "Are you sure?")
    episode = await bench.open()
    first = await say(episode)
    cut = await say(episode, [USER, back(first), MORE], max_tokens=1)
    assert cut.finish_reason == "length"
    assert (await bench.trajectory(episode, 0.5, wanted)).outcome == COMPLETED


@pytest.mark.parametrize(("wanted", "kind"), [(None, OutcomeKind.TRUNCATED), (COMPLETED, OutcomeKind.COMPLETED)])
@pytest.mark.parametrize("limit", [{"max_new_tokens": 3}, {"max_response_tokens": 3}])
async def test_limit_of_run_truncates(make_bench, wanted, kind, limit):
    bench = await make_bench("It is forty-six.", **limit)
    episode = await bench.open()
    assert (await say(episode)).finish_reason == "length"
    assert (await bench.trajectory(episode, 0.5, wanted)).outcome.kind is kind


async def test_a_reward_function_that_fails_is_a_failure_not_a_zero(make_bench):
    """One that reads `tool_rewards` fails too: tools that grade run in agent workers alone."""

    def of_tools(data_source, solution_str, ground_truth, extra_info):
        return sum(extra_info["tool_rewards"].values())

    bench = await make_bench(reward=RewardFunction(of_tools))
    episode = await bench.open()
    await say(episode)
    ending = await bench.manager.finish(episode.handle, None)
    assert (ending.outcome, ending.reward, ending.tried_again) == ("infra_error", None, True)
    assert (await bench.queue.status()).episodes["retried"] == 1


async def test_a_failed_agent_gives_its_task_back(make_bench):
    bench = await make_bench("A", "B")
    episode = await bench.open()
    await say(episode)
    assert (await bench.manager.finish(episode.handle, INFRA)).tried_again
    again = await bench.open()
    assert (again.lease.episode_id, again.lease.attempt) == (episode.lease.episode_id, 1)
    assert (await say(again)).content == "B"
    assert len((await bench.trajectory(again)).segments) == 1


async def test_no_episode_is_said_with_the_queues_cause(make_bench):
    bench = await make_bench()
    await bench.open()
    await bench.open()
    with pytest.raises(NotNow, match="no episode is queued; 2 are being run"):
        await bench.open()
    bench.client.version = None
    with pytest.raises(NotNow, match="no rollout server"):
        await bench.open()


async def test_an_episode_is_waited_for(make_bench):
    bench = await make_bench()
    held = [await bench.open(), await bench.open()]
    waiting = asyncio.create_task(bench.manager.open(60.0))
    await asyncio.sleep(0.1)
    await bench.manager.finish(held[0].handle, INFRA)
    assert (await waiting).lease.episode_id == held[0].lease.episode_id


@pytest.mark.parametrize("handle", ["", "x", "aGVsbG8", "MSA", "ä", "../..", "MSB0cmFpbi8wMDAwIzA="])
async def test_what_is_no_handle_is_not_found(make_bench, handle):
    bench = await make_bench()
    with pytest.raises(NoEpisode):
        await bench.manager.find(handle)


async def test_a_silent_episode_goes_back(make_bench):
    bench = await make_bench("A")
    bench.manager = SessionManager(replace(bench.parts, config=_idle(bench.parts.config, 0.05)), 0.06)
    episode = await bench.open()
    await say(episode)
    bench.manager.start()
    async with asyncio.timeout(60):
        while episode.gone is None:
            await asyncio.sleep(0.01)
    with pytest.raises(Gone, match="silent for"):
        await bench.manager.find(episode.handle)
    assert (await bench.queue.status()).episodes["retried"] == 1


async def test_an_episode_over_its_deadline_goes_back_even_while_it_speaks(make_bench):
    bench = await make_bench("A", episode_deadline_s=0.1)
    bench.manager = SessionManager(bench.parts, 0.06)
    bench.manager.start()
    episode = await bench.open()
    bench.client._latency_s = 600.0
    with pytest.raises(Gone, match="not finished within"):
        await say(episode)


async def test_what_another_sidecar_serves_by_now_is_left_to_it(make_bench):
    bench = await make_bench("A", "B")
    here = SessionManager(replace(bench.parts, config=_idle(bench.parts.config, 0.2)), 0.06)
    there = SessionManager(bench.parts, 30.0)
    episode = await here.open(0.0)
    first = await say(episode)
    elsewhere = await there.find(episode.handle)
    await say(elsewhere, [USER, back(first), MORE])
    here.start()
    async with asyncio.timeout(60):
        while here.count:
            await asyncio.sleep(0.01)
    assert (await there.find(episode.handle)).gone is None
    assert (await bench.queue.status()).episodes["retried"] == 0
    await here.close()


async def test_closing_leaves_the_lease(make_bench):
    bench = await make_bench("A", "B")
    episode = await bench.open()
    first = await say(episode)
    bench.client._latency_s = 600.0
    call = await episode.answer(asked([USER, back(first), MORE]))
    await bench.manager.close()
    with pytest.raises(Gone, match="stops"):
        await call.whole()
    bench.client._latency_s = 0.0
    again = await bench.restart().find(episode.handle)
    assert len(again.history.turns) == 1


async def test_a_journal_that_renders_to_other_ids_is_a_failure_of_ours(make_bench, chat_for):
    bench = await make_bench("A")
    episode = await bench.open()
    await say(episode)
    bench.parts = replace(bench.parts, chat=chat_for("chatml"))
    with pytest.raises(Gone, match="renders to other ids"):
        await bench.restart().find(episode.handle)
    assert (await bench.queue.status()).episodes["retried"] == 1


async def test_ids_that_do_not_fit_end_the_episode(make_bench):
    bench = await make_bench("A")
    episode = await bench.open()

    class Liar:
        async def generate(self, request):
            return SimpleNamespace(
                token_ids=[5], logprobs=[-1.0, -1.0], version_spans=[(0, 0, 1)], finish_reason="stop"
            )

    episode.llm._client = Liar()
    with pytest.raises(Gone, match="1 token ids but 2 logprobs"):
        await say(episode)
    await bench.manager._look_at(episode)
    assert (await bench.queue.status()).episodes["retried"] == 1


async def test_the_journals_hashes_are_of_what_was_fed(make_bench):
    bench = await make_bench("A", "B")
    episode = await bench.open()
    first = await say(episode)
    await say(episode, [USER, back(first), MORE])
    for entry, request in zip(await bench.journal(episode), bench.client.requests, strict=True):
        assert (entry.context_len, entry.context_hash) == (len(request.token_ids), hash_of(request.token_ids))
        assert isinstance(entry.ids, np.ndarray)


async def test_who_waits_for_work_is_told_that_the_server_drains(make_bench):
    bench = await make_bench(tasks=0)
    draining = []
    manager = SessionManager(replace(bench.parts, draining=lambda: bool(draining)), 30.0)
    waiting = asyncio.create_task(manager.open(30.0))
    await asyncio.sleep(0.1)
    draining.append(True)
    with pytest.raises(NotNow, match="draining"):
        await waiting


async def test_nothing_is_leased_for_who_has_hung_up(make_bench):
    bench = await make_bench()

    async def gone():
        return True

    with pytest.raises(NotNow, match="disconnected"):
        await bench.manager.open(30.0, gone)
    assert (await bench.queue.status()).episodes["leased"] == 0


def _idle(config, idle_s):
    return config.model_copy(update={"capture": config.capture.model_copy(update={"idle_s": idle_s})})


printable = st.text(alphabet=st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=80)


@given(printable, st.integers(0, 10**14))
def test_a_handle_says_which_lease(episode_id: str, fence: int) -> None:
    handle = handle_of(episode_id, fence)
    assert lease_of(handle) == (episode_id, fence)
    assert all(one.isalnum() or one in "-_" for one in handle)


@given(st.text(max_size=40))
def test_whatever_else_is_refused(text: str) -> None:
    try:
        episode_id, fence = lease_of(text)
    except BadHandle:
        return
    assert handle_of(episode_id, fence) == text


def test_a_key_opens_its_own_paths_only() -> None:
    mine, other = handle_of("train/0#0", 7), handle_of("train/0#0", 8)
    key = episode_key("token", mine)
    assert (len(key), opens("token", f"/episodes/{mine}/v1/chat/completions", key)) == (64, True)
    others = ("/episodes", "/episodes/", "/generate", f"/episodes/{other}/v1/models", f"/x/episodes/{mine}/v1/models")
    run_only = (f"/episodes/{mine}", *(f"/episodes/{mine}/{route}" for route in ("reward", "finish", "v1", "v1x/a")))
    for path in (*others, *run_only):
        assert not opens("token", path, key), path
    assert not opens("token", "/episodes//v1", episode_key("token", ""))
    assert not opens("another token", f"/episodes/{mine}/v1", key)
    assert not opens("token", f"/episodes/{mine}/v1", "\udce9é")
