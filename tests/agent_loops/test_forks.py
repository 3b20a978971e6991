"""Branches of episodes: exact shared beginnings, states of their own, one trajectory each, whichever worker dies."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.agent_loops.conftest import call_text

from penstock.agent_loops import AgentConfig, AgentError, AgentLoopBase, Episode, EpisodeJournal
from penstock.agent_loops.config import ForksConfig
from penstock.agent_loops.forks import choose_turn, mean_entropy
from penstock.agent_loops.journal import SESSIONS, JournaledTurn
from penstock.agent_loops.loops import ToolAgentLoop
from penstock.testing import FakeClient, MemoryTransferQueue
from penstock.transfer_queue import JournalEntry, JournalKind, Limits, Origin, OutcomeKind, Trajectory

TURNS = 3
"""Turns with a call; an answer follows."""


class Sampler(FakeClient):
    """Calls the calculator `TURNS` times, then answers; no two samples are the same."""

    def __init__(self, chat: Any) -> None:
        self._chat, self.samples = chat, 0
        super().__init__(self._sample)

    def _sample(self, context: list[int]) -> list[int]:
        self.samples += 1
        results = self._chat.decode(context).count("<|im_start|>user\n<tool_response>")
        text = call_text(f"12+{self.samples}") if results < TURNS else f"The answer is 46, not {self.samples}."
        return self._chat.encode(text + "<|im_end|>")


class ForkAtEnd(ToolAgentLoop):
    turn = 0

    async def run(self, task):
        outputs = await super().run(task)
        await self.fork(self.turn)
        return outputs


class ForkOnTheWay(AgentLoopBase):
    """Forks before each model call but the first."""

    async def run(self, task):
        segment = self.chat.start(task.messages, tools=self.tools.schemas)
        while not segment.done:
            if self.llm.counts.calls:
                await self.fork(count=1)
            reply = await self.llm.generate(segment)
            calls = self.chat.tool_calls(reply)
            if not calls:
                break
            segment.observe(self.chat.render_tools(await self.tools.call_all(calls)))
        return segment.output()


class Stage:
    """One group of four members, and a worker's parts for it."""

    def __init__(self, parts_of, chat_for, tasks_of, tool, loop=None, turn="loop", **limits):
        self.queue = MemoryTransferQueue(clock=lambda: self.now)
        self.now = 0.0
        self.limits = Limits(**{"group_size": 4, "groups_per_step": 1, "max_staleness": 0, "branches": 3, **limits})
        self.tasks = tasks_of()
        config = AgentConfig(
            max_turns=8, max_response_tokens=1000, forks=ForksConfig(branches=self.limits.branches, turn=turn)
        )
        find = {} if loop is None else {"find_loop": lambda name: loop}
        self.client = Sampler(chat_for())
        self.parts = parts_of(self.queue, self.client, tool, config=config, **find)

    async def start(self):
        await self.queue.create_run(self.limits, "{}")
        await self.queue.submit(self.tasks)
        return self

    async def lease(self, count=9):
        return await self.queue.lease_episodes("worker", count, 0)

    async def run_next(self):
        """Runs all episodes that may start; returns their number."""
        leases = await self.lease()
        await asyncio.gather(*(Episode(self.parts, lease).run() for lease in leases))
        return len(leases)

    async def finish(self) -> dict[str, Trajectory]:
        while await self.run_next():
            pass
        return await self.trajectories()

    async def trajectories(self) -> dict[str, Trajectory]:
        return {one.episode_id: one for one in await self.queue.read(sorted(await self.queue.held()))}


@pytest.fixture
def stage_of(parts_of, chat_for, tasks_of, calculator):
    async def make(loop=None, tool=None, **fields):
        return await Stage(parts_of, chat_for, tasks_of, tool or calculator, loop, **fields).start()

    return make


def origins(trajectories: dict[str, Trajectory]) -> dict[str, Origin]:
    return {name: Origin(**one.extra["origin"]) for name, one in trajectories.items() if "origin" in one.extra}


def assert_prefixes_are_shared(trajectories: dict[str, Trajectory]) -> None:
    """Ids, logprobs and versions before the fork are the parent's; what was sampled there is not."""
    for name, origin in origins(trajectories).items():
        (branch,), (parent,) = trajectories[name].segments, trajectories[origin.parent].segments
        place = int(parent.turn_starts[origin.turn])
        assert branch.prompt_ids.tolist() == parent.prompt_ids.tolist()
        assert branch.turn_starts[origin.turn] == place
        for field in ("response_ids", "response_mask", "response_logprobs"):
            assert getattr(branch, field)[:place].tolist() == getattr(parent, field)[:place].tolist()
        assert branch.versions()[:place].tolist() == parent.versions()[:place].tolist()
        assert branch.response_ids[place:].tolist() != parent.response_ids[place:].tolist()
        assert int(branch.response_mask[:place].sum()) == origin.sampled
        calls = origin.turn
        assert (
            trajectories[name].extra["tool_results"][:calls]
            == trajectories[origin.parent].extra["tool_results"][:calls]
        )


@pytest.mark.parametrize("turn", range(TURNS + 1))
async def test_branches_share_all_before_the_turn(stage_of, calculator, turn):
    stage = await stage_of(type("Loop", (ForkAtEnd,), {"turn": turn}))
    trajectories = await stage.finish()
    assert len(trajectories) == 4
    assert {origin.turn for origin in origins(trajectories).values()} == {turn}
    assert len(origins(trajectories)) == 3
    assert_prefixes_are_shared(trajectories)
    sampled = [one.num_sampled for one in trajectories.values()]
    assert stage.client.samples == (TURNS + 1) + 3 * (TURNS + 1 - turn)
    assert len({tuple(one.segments[0].response_ids.tolist()) for one in trajectories.values()}) == 4
    fates = sum(member.sampled for member in stage.queue._state.groups["train/00000000"].members)
    assert fates == sum(sampled) - sum(origin.sampled for origin in origins(trajectories).values())


async def test_a_branch_has_boxes_of_its_own(stage_of, calculator):
    """Its fresh state has seen the calls before the fork; the parent's box never sees a branch's calls."""
    stage = await stage_of(type("Loop", (ForkAtEnd,), {"turn": 2}))
    trajectories = await stage.finish()
    assert (calculator.created, calculator.released, calculator.open) == (4, 4, 0)
    results = [one.extra["tool_results"] for one in trajectories.values()]
    assert {tuple(text.partition(" ")[2] for text in texts) for texts in results} == {
        ("(call 1)", "(call 2)", "(call 3)")
    }
    assert {one.metrics["restarts"] for one in trajectories.values()} == {0}


async def test_a_branch_knows_no_name_of_its_parents_run(stage_of):
    """Its calls must not be answered with the parent's results, nor run in the parent's box."""
    stage = await stage_of(ToolAgentLoop)
    (root,) = await stage.lease()
    parent = EpisodeJournal(stage.queue, root)
    name = await parent.life()
    await parent.append(sampled([-1.0], 7))
    data = {"results": [], SESSIONS: {"calculator": "box-1"}}
    await parent.append(JournalEntry(JournalKind.TOOLS, context_hash=8, data=data))
    await parent.append(sampled([-1.0], 9))
    assert await parent.fork(1, 1) == ["train/00000000#1"]
    (lease,) = await stage.lease()
    assert lease.origin == Origin(root.episode_id, 1, entries=3, sampled=1)
    branch = EpisodeJournal(stage.queue, lease)
    assert (parent.origin, branch.origin) == (None, lease.origin)
    assert branch.sessions == {}
    assert await branch.life() != name
    assert await branch.fork(1, 1) == [], "its parent's fork"
    taken = [branch.take(kind, context) for kind, context in ((JournalKind.SAMPLED, 7), (JournalKind.TOOLS, 8))]
    assert [one.context_hash for one in taken if one] == [7, 8]
    assert branch.take(JournalKind.TOOLS, 0) is None
    await branch.restart("it strayed")
    assert branch.origin is None


async def test_a_branch_that_restarts_has_sampled_all_its_tokens(stage_of):
    """Its loop did not follow the shared journal, and no token of its trajectory is its parent's."""
    stage = await stage_of(type("Loop", (ForkAtEnd,), {"turn": 2}))
    assert await stage.run_next() == 1
    members = stage.queue._state.groups["train/00000000"].members
    members[1].journal[0] = (dataclasses.replace(members[1].journal[0][0], context_hash=0), 1)
    trajectories = await stage.finish()
    assert origins(trajectories).keys() == {"train/00000000#2", "train/00000000#3"}
    assert members[1].sampled == trajectories["train/00000000#1"].num_sampled


async def test_a_branch_shares_no_token_that_its_parent_gave_up(stage_of):
    stage = await stage_of(ToolAgentLoop)
    (root,) = await stage.lease()
    parent = EpisodeJournal(stage.queue, root)
    await parent.append(sampled([-1.0] * 5, 7))
    await parent.restart("it strayed")
    await parent.append(sampled([-1.0], 7))
    assert await parent.fork(1, 1) == ["train/00000000#1"]
    (lease,) = await stage.lease()
    origin = EpisodeJournal(stage.queue, lease).origin
    assert origin is not None
    assert (origin.turn, origin.sampled) == (1, 1)


async def test_a_killed_worker_that_forked_finds_its_branches(stage_of, calculator):
    """Killed between the fork and the next answer; the branches may run before its episode is taken up again."""
    stage = await stage_of(ForkOnTheWay)
    (root,) = await stage.lease()
    task = asyncio.create_task(Episode(stage.parts, root).run())
    while not stage.queue._state.open_episodes(train=True, version=0):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    stage.now += 1000.0
    trajectories = await stage.finish()
    assert len(trajectories) == 4
    parents = {name: (origin.parent[-1], origin.turn) for name, origin in origins(trajectories).items()}
    assert parents["train/00000000#1"] == ("0", 1)
    assert_prefixes_are_shared(trajectories)
    assert calculator.open == 0


@pytest.mark.parametrize("seed", range(8))
async def test_forks_and_deaths_at_random_keep_every_account(stage_of, calculator, seed):
    rng = random.Random(seed)
    loop = rng.choice([None, ForkOnTheWay])
    stage = await stage_of(loop, turn="random", group_size=8, max_lost_leases=10_000, max_attempts=1)
    for _ in range(200):
        leases = await stage.lease(rng.randint(1, 8))
        tasks = [asyncio.create_task(Episode(stage.parts, lease).run()) for lease in leases]
        for _ in range(rng.randrange(200)):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) or end.kind is OutcomeKind.COMPLETED for end in ends)
        stage.now += 1000.0
        if len(await stage.queue.held()) == 8:
            break
    trajectories = await stage.trajectories()
    assert len(trajectories) == 8
    assert len(origins(trajectories)) == 6
    assert_prefixes_are_shared(trajectories)
    assert calculator.open == 0
    status = await stage.queue.status()
    assert (status.groups["ready"], status.episodes["completed"], status.episodes["leased"]) == (1, 8, 0)


async def test_members_without_a_fork_run_as_roots(stage_of):
    stage = await stage_of(ToolAgentLoop)
    assert await stage.run_next() == 1
    assert await stage.run_next() == 3
    assert origins(await stage.trajectories()) == {}


async def test_a_root_is_forked_once_it_has_ended(stage_of):
    """`agent.forks.turn` chooses; all tokens have one logprob here, and the first of equal turns is taken."""
    stage = await stage_of(ToolAgentLoop, turn="entropy")
    trajectories = await stage.finish()
    assert {(origin.parent, origin.turn) for origin in origins(trajectories).values()} == {("train/00000000#0", 0)}


class Lasting(AgentLoopBase):
    """Forks behind calls whose state no replay restores."""

    async def run(self, task):
        segment = self.chat.start(task.messages, tools=self.tools.schemas)
        reply = await self.llm.generate(segment)
        segment.observe(self.chat.render_tools(await self.tools.call_all(self.chat.tool_calls(reply))))
        branches = [len(await self.fork(turn, 1)) for turn in (0, 1)]
        return segment.output(extra={"branches": branches})


@pytest.mark.parametrize("lost", ["tool", "setting"])
async def test_a_state_that_cannot_be_restored_has_no_branches(stage_of, calculator, lost):
    stage = await stage_of(Lasting)
    if lost == "tool":
        calculator.replayable = False
    else:
        stage.parts = dataclasses.replace(stage.parts, on_lost="restart")
    trajectories = await stage.finish()
    assert trajectories["train/00000000#0"].extra["branches"] == [1, 0]
    assert {origin.turn for origin in origins(trajectories).values()} == {0}


async def test_fork_beyond_the_episode_is_an_error(stage_of):
    stage = await stage_of(type("Loop", (ForkAtEnd,), {"turn": 9}))
    (root,) = await stage.lease()
    outcome = await Episode(stage.parts, root).run()
    assert (outcome.kind, outcome.component) == (OutcomeKind.INFRA_ERROR, "loop")
    assert "fork() at model call 9: the episode has 4" in outcome.reason


async def test_fork_of_concurrent_branches_is_refused(stage_of):
    stage = await stage_of(ToolAgentLoop)
    (root,) = await stage.lease()
    journal = EpisodeJournal(stage.queue, root)
    with journal.branching(), pytest.raises(AgentError, match="run concurrently"):
        await journal.fork(0, 1)


async def test_fork_appends_what_the_queue_has_lost(stage_of):
    stage = await stage_of(ToolAgentLoop)
    (root,) = await stage.lease()
    journal = EpisodeJournal(stage.queue, root)
    for number in range(3):
        await journal.append(sampled([-0.1], number))
    del stage.queue._state.groups["train/00000000"].members[0].journal[1:]
    assert await journal.fork(2, 1) == ["train/00000000#1"]
    (branch,) = await stage.lease()
    assert [entry.context_hash for entry in branch.journal] == [0, 1]
    assert len((await stage.queue.adopt(root.episode_id, root.fence)).journal) == 3


def sampled(logprobs: Sequence[float], context: int = 0) -> JournalEntry:
    ids = np.arange(len(logprobs), dtype=np.int32)
    spans = np.array([[0, 0, len(ids)]], dtype=np.int32)
    values = np.array(logprobs, dtype=np.float32)
    return JournalEntry(JournalKind.SAMPLED, 0, context, ids, values, spans, {"finish_reason": "stop"})


def turns(*logprobs: Sequence[float], lasting_after: int = 9) -> list[JournaledTurn]:
    return [JournaledTurn(n, n < lasting_after, sampled(values)) for n, values in enumerate(logprobs)]


def test_mean_entropy_is_the_mean_of_negative_logprobs() -> None:
    assert mean_entropy(sampled([-1.0, -2.0, 0.0])) == pytest.approx(1.0)


def test_choice_is_the_turn_of_the_highest_mean_entropy() -> None:
    """The mean, so that a long turn is not chosen for its length."""
    assert choose_turn("entropy", turns([-0.1], [-0.5] * 9, [-2.0], [-1.0]), "a") == 2
    assert choose_turn("entropy", turns([-0.1], [-0.5] * 9, [-2.0], [-1.0], lasting_after=2), "a") == 1
    assert choose_turn("entropy", [], "a") is None


def test_choice_at_random_is_the_same_for_each_owner() -> None:
    of = turns([-1.0], [-1.0], [-1.0])
    chosen = [choose_turn("random", of, seed) for seed in "abcdefghijklmnop"]
    assert set(chosen) == {0, 1, 2}
    assert chosen == [choose_turn("random", of, seed) for seed in "abcdefghijklmnop"]
