from __future__ import annotations

import asyncio
import dataclasses
import gc

import pytest

from penstock.agent_loops import AgentConfig, AgentLoopBase, Episode, EpisodeJournal, InfraFailure, ToolBox
from penstock.agent_loops.rewards import BaseReward, RewardFunction
from penstock.rollout_server import Generation
from penstock.testing import FakeClient
from penstock.transfer_queue import COMPLETED, Outcome, OutcomeKind


@pytest.fixture
def run(queue_of, tasks_of, parts_of, calling_policy):
    async def go(client=None, tool=None, loop=None, queue=None, **fields):
        queue = queue or queue_of(tasks_of())
        parts = parts_of(queue, client or FakeClient(calling_policy()), tool, **fields)
        if loop is not None:
            parts = dataclasses.replace(parts, find_loop=lambda name: loop)
        outcome = await Episode(parts, queue.lease(tasks_of()[0])).run()
        return outcome, queue.done.get("train/00000000"), queue

    return go


async def test_an_episode_with_a_tool_is_recorded_token_for_token(run, calculator, chat_for):
    outcome, trajectory, _ = await run(tool=calculator)
    (segment,) = trajectory.segments
    chat = chat_for()
    text = chat.decode(segment.response_ids)
    assert text.startswith('<tool_call>\n{"name": "calculator"')
    assert "<tool_response>\n46 (call 1)\n</tool_response>" in text
    assert text.endswith("The answer is 46.<|im_end|>")
    assert (trajectory.reward, outcome.kind, trajectory.num_turns) == (1.0, OutcomeKind.COMPLETED, 2)
    assert segment.turn_starts.tolist()[0] == 0
    assert trajectory.extra["tool_results"] == ["46 (call 1)"]
    spans = trajectory.extra["trace"]
    assert [span[:2] for span in spans] == [["model", ""], ["tool", "calculator"], ["model", ""], ["reward", ""]]
    assert [span[2] for span in spans] == sorted(span[2] for span in spans)
    wanted = {"num_turns": 2, "tool_calls": 1, "tool_errors": 0, "calls": 2, "token_mismatches": 0, "calls_resumed": 0}
    assert wanted.items() <= trajectory.metrics.items()
    assert trajectory.metrics["response_tokens"] == len(segment.response_ids)
    assert (calculator.created, calculator.open) == (1, 0)


async def test_an_ended_episode_is_freed_without_a_collection(run, calculator):
    """A worker collects rarely (`frozen_start`): in cycles, the tokens of hundreds of ended episodes would wait."""

    def parts():
        return [one for one in gc.get_objects() if isinstance(one, Episode | EpisodeJournal | ToolBox | AgentLoopBase)]

    of_others = parts()
    gc.disable()
    try:
        await run(tool=calculator)
        left = [one for one in parts() if not any(one is other for other in of_others)]
    finally:
        gc.enable()
    assert calculator.executed
    assert left == []


async def test_episode_out_of_turns_is_truncated(run, calculator, calling_policy):
    config = AgentConfig(max_turns=2, max_response_tokens=1000)
    outcome, trajectory, _ = await run(FakeClient(calling_policy(turns=9)), calculator, config=config)
    assert outcome == Outcome(OutcomeKind.TRUNCATED, "turns")
    assert calculator.executed == ["12+34"]
    assert trajectory.reward == 1.0
    assert trajectory.segments[0].response_mask[-1] == 1


@pytest.mark.parametrize(("tokens", "ending"), [(5, COMPLETED), (3, Outcome(OutcomeKind.TRUNCATED, "length"))])
async def test_own_limit_of_a_call_does_not_truncate(run, calling_policy, tokens, ending):
    """As for clients of the gateway: an answer as long as its caller asked for is whole, and another may follow."""

    class Brief(AgentLoopBase):
        async def run(self, task):
            segment = self.chat.start(task.messages)
            reply = await self.llm.generate(segment, max_new_tokens=5)
            assert (len(reply.token_ids), reply.finish_reason, segment.done) == (tokens, "length", ending != COMPLETED)
            return segment.output(reward=1.0)

    config = AgentConfig(max_response_tokens=tokens + (tokens == 5))
    outcome, _, _ = await run(FakeClient(calling_policy()), loop=Brief, config=config)
    assert outcome == ending


async def test_the_deadline_keeps_what_was_sampled(run, calculator):
    calculator.delay_s = 30
    config = AgentConfig(episode_deadline_s=5.0, max_response_tokens=1000)
    outcome, trajectory, _ = await run(tool=calculator, config=config, tool_timeout_s=60)
    assert outcome == Outcome(OutcomeKind.TRUNCATED, "deadline")
    assert trajectory.num_turns == 1
    assert trajectory.reward == 0.0
    assert calculator.open == 0


async def test_episode_deadline_before_sampling_is_infra(run, calling_policy):
    config = AgentConfig(episode_deadline_s=0.05)
    outcome, trajectory, queue = await run(FakeClient(calling_policy(), latency_s=9), config=config)
    assert (outcome.kind, outcome.component, trajectory) == (OutcomeKind.INFRA_ERROR, "rollout", None)
    assert queue.failed[0].reason == "nothing was sampled within 0.05 s"


class Recording(AgentLoopBase):
    log: list[str] = []  # noqa: RUF012

    async def setup(self, task):
        self.log.append("setup")

    async def run(self, task):
        self.log.append("run")
        raise KeyError("a bug of the user's")

    async def teardown(self):
        self.log.append("teardown")


async def test_episode_loop_bug_is_infra_after_teardown(run):
    Recording.log.clear()
    outcome, trajectory, _ = await run(loop=Recording)
    assert Recording.log == ["setup", "run", "teardown"]
    assert (outcome.kind, outcome.component) == (OutcomeKind.INFRA_ERROR, "loop")
    assert "a bug of the user's" in outcome.reason
    assert trajectory is None


async def test_a_loop_that_swallows_our_failure_is_not_rewarded(run):
    class Stubborn(AgentLoopBase):
        async def run(self, task):
            segment = self.chat.start(task.messages)
            await self.llm.generate(segment)
            try:
                await self.llm.generate(segment)
            except InfraFailure:
                return segment.output(reward=1.0)

    answers = iter([[5, 2]])
    outcome, trajectory, _ = await run(FakeClient(lambda context: next(answers)), loop=Stubborn)
    assert (outcome.kind, outcome.component, trajectory) == (OutcomeKind.INFRA_ERROR, "rollout", None)


async def test_outputs_edited_by_hand_are_refused_and_counted(run, queue_of, tasks_of, parts_of, calling_policy):
    class Edited(AgentLoopBase):
        async def run(self, task):
            segment = self.chat.start(task.messages)
            await self.llm.generate(segment)
            output = segment.output(reward=1.0)
            output.response_ids[0] += 1
            return output

    outcome, _, _ = await run(loop=Edited)
    assert (outcome.kind, outcome.component) == (OutcomeKind.INFRA_ERROR, "loop")
    assert "not what the engine sampled" in outcome.reason


async def test_a_token_mismatch_shows_in_the_next_trajectory(queue_of, tasks_of, parts_of, calling_policy):
    class Broken(FakeClient):
        async def generate(self, request):
            whole = await super().generate(request)
            logprobs = whole.logprobs[1:] if len(self.requests) == 1 else whole.logprobs
            return Generation(whole.token_ids, logprobs, whole.version_spans, whole.finish_reason)

    queue = queue_of(tasks_of(2))
    parts = parts_of(queue, Broken(calling_policy(turns=0)))
    first, second = [await Episode(parts, queue.lease(task)).run() for task in tasks_of(2)]
    assert (first.kind, first.component) == (OutcomeKind.INFRA_ERROR, "rollout")
    assert second.kind is OutcomeKind.COMPLETED
    assert queue.done["train/00000001"].metrics["token_mismatches"] == 1


@pytest.mark.parametrize("returned", [None, [], "text"])
async def test_episode_bad_return_value_is_infra(run, returned):
    class Wrong(AgentLoopBase):
        async def run(self, task):
            return returned

    outcome, _, _ = await run(loop=Wrong)
    assert outcome.component == "loop"
    assert "segment.output()" in outcome.reason


async def test_episode_several_segments_one_trajectory(run):
    class Two(AgentLoopBase):
        async def run(self, task):
            first, second = self.chat.start(task.messages), self.chat.start(task.messages)
            await self.llm.generate(first)
            await self.llm.generate(second)
            return [first.output(reward=0.25, turn_rewards=[0.1]), second.output(turn_rewards=[0.2])]

    _, trajectory, _ = await run(loop=Two)
    assert len(trajectory.segments) == 2
    assert (trajectory.reward, trajectory.turn_rewards, trajectory.num_turns) == (0.25, (0.1, 0.2), 2)


async def test_a_policy_error_may_carry_a_reward_and_cancelled_may_not(run):
    def ending(outcome):
        class Ending(AgentLoopBase):
            async def run(self, task):
                segment = self.chat.start(task.messages)
                await self.llm.generate(segment)
                return segment.output(reward=-1.0, outcome=outcome)

        return Ending

    _, trajectory, _ = await run(loop=ending(Outcome(OutcomeKind.POLICY_ERROR, "no answer")))
    assert trajectory.reward == -1.0
    outcome, trajectory, queue = await run(loop=ending(Outcome(OutcomeKind.CANCELLED)))
    assert (outcome.kind, trajectory) == (OutcomeKind.CANCELLED, None)
    assert len(queue.failed) == 1


async def test_episode_without_reward_fails(run):
    outcome, _, _ = await run(reward=None)
    assert outcome.component == "reward"
    assert "agent.reward" in outcome.reason


async def test_a_tools_reward_serves_where_there_is_no_other(run, calculator):
    async def calc_reward(state):
        return len(state.history) / 4

    calculator.calc_reward = calc_reward
    _, trajectory, _ = await run(tool=calculator, reward=None)
    assert trajectory.reward == 0.25
    assert trajectory.metrics["tool_reward/calculator"] == 0.25


async def test_episode_nondeterministic_loop_restarts(queue_of, tasks_of, parts_of, calling_policy):
    class Fickle(AgentLoopBase):
        runs = 0

        async def run(self, task):
            Fickle.runs += 1
            segment = self.chat.start([{"role": "user", "content": f"try {Fickle.runs}"}])
            await self.llm.generate(segment)
            await self.llm.generate(segment)
            return segment.output(reward=1.0)

    queue = queue_of(tasks_of())
    answers = iter([[5, 2], None, [6, 2], [7, 2]])
    parts = dataclasses.replace(parts_of(queue, FakeClient(lambda _: next(answers))), find_loop=lambda name: Fickle)
    await Episode(parts, queue.lease(tasks_of()[0])).run()
    assert queue.failed
    queue.failed.clear()
    await Episode(parts, queue.lease(tasks_of()[0])).run()
    trajectory = queue.done["train/00000000"]
    assert trajectory.metrics["restarts"] == 1
    assert trajectory.segments[0].response_ids.tolist() == [6, 2, 7, 2]


async def test_the_rows_sampling_overrides_the_runs(run, queue_of, tasks_of, parts_of, calling_policy):
    client = FakeClient(calling_policy(turns=0))
    tasks = tasks_of(sampling={"temperature": 0.0})
    queue = queue_of(tasks)
    await Episode(parts_of(queue, client), queue.lease(tasks[0])).run()
    assert client.requests[0].sampling.temperature == 0.0
    assert client.requests[0].sampling.stop_token_ids == (2,)
    for member, temperature in ((0, 0.0), (1, 1.0)):
        (one_greedy,) = tasks_of(sampling={"greedy_member": 0})
        fresh = queue_of([one_greedy])
        lease = dataclasses.replace(fresh.lease(one_greedy), member=member)
        await Episode(parts_of(fresh, client), lease).run()
        assert client.requests[-1].sampling.temperature == temperature
    (bad,) = tasks_of(sampling={"temprature": 0.0})
    outcome = await Episode(parts_of(queue, client), queue.lease(bad)).run()
    assert outcome.component == "task"
    assert "temprature" in outcome.reason


async def test_reward_sees_the_text_of_every_segment(run, chat_for):
    class Two(AgentLoopBase):
        async def run(self, task):
            plan, answer = self.chat.start(task.messages), self.chat.start([{"role": "user", "content": "Go."}])
            for segment in (plan, answer):
                await self.llm.generate(segment)
            return [plan.output(), answer.output()]

    seen = {}

    def judge(data_source, solution_str, ground_truth, extra_info):
        seen.update(extra_info, solution=solution_str, source=data_source)
        return {"score": 0.5, "format": 1, "note": "fine"}

    said = iter(["I add 12 and 34.<|im_end|>", "It is 46.<|im_end|>"])
    client = FakeClient(lambda context: chat_for().encode(next(said)))
    _, trajectory, _ = await run(client, loop=Two, reward=RewardFunction(judge))
    assert (seen["segments"], seen["solution"]) == (["I add 12 and 34.", "It is 46."], "It is 46.")
    assert (seen["source"], trajectory.reward, trajectory.metrics["reward/format"]) == ("sums", 0.5, 1.0)
    assert "reward/note" not in trajectory.metrics


async def test_episode_failed_reward_stores_nothing(run):
    class Broken(BaseReward):
        async def score(self, answer):
            assert answer.messages == [{"role": "user", "content": "What is 12+34?"}]
            raise InfraFailure("maths", "died")

    outcome, trajectory, queue = await run(reward=RewardFunction(Broken(), "broken"))
    assert (outcome.kind, outcome.component) == (OutcomeKind.INFRA_ERROR, "maths")
    assert trajectory is None
    assert queue.failed == [outcome]


class Paid(BaseReward):
    """Each time it is asked it gives another score."""

    def __init__(self):
        super().__init__()
        self.asked = []

    async def score(self, answer):
        self.asked.append(answer.solution)
        return {"score": float(len(self.asked)), "length": len(answer.solution)}


def free_function(data_source, solution_str, ground_truth, extra_info):
    return 1.0


free_function.journaled = False


@pytest.fixture
def resumed(queue_of, tasks_of, parts_of, chat_for):
    """One worker dies between the reward and `complete`; the next one runs the episode to its end."""

    async def go(reward, between=lambda queue, client: None):
        queue = queue_of(tasks_of())
        complete, client = queue.complete, FakeClient(lambda context: chat_for().encode("It is 46.<|im_end|>"))
        parts = parts_of(queue, client, reward=RewardFunction(reward))

        async def dies(lease, trajectory):
            raise asyncio.CancelledError

        queue.complete = dies
        with pytest.raises(asyncio.CancelledError):
            await Episode(parts, queue.lease(tasks_of()[0])).run()
        queue.complete = complete
        between(queue, client)
        await Episode(parts, queue.lease(tasks_of()[0])).run()
        return queue.done["train/00000000"], queue

    return go


async def test_reward_of_dead_worker_is_in_the_journal(resumed):
    paid = Paid()
    trajectory, _ = await resumed(paid)
    assert paid.asked == ["It is 46."]
    assert (trajectory.reward, trajectory.metrics["reward/length"]) == (1.0, 9.0)


async def test_journaled_reward_is_of_these_tokens_only(resumed, chat_for):
    def sampled_anew(queue, client):
        """The machine of the queue died with the answer; what was told since is left."""
        queue.rewind("train/00000000", [one for one in queue.journals["train/00000000"] if one.ids is None])
        client.reply = lambda context: chat_for().encode("It is 47.<|im_end|>")

    paid = Paid()
    trajectory, _ = await resumed(paid, sampled_anew)
    assert (paid.asked, trajectory.reward) == (["It is 46.", "It is 47."], 2.0)


async def test_reward_that_costs_nothing_is_not_journaled(resumed):
    trajectory, queue = await resumed(free_function)
    assert trajectory.reward == 1.0
    assert [one.ids is None for one in queue.journals["train/00000000"]] == [False], "one entry, the answer"
