from __future__ import annotations

import pytest

from penstock.agent_loops import EpisodeJournal, EpisodeRestart, RecordedScore, ToolBox
from penstock.agent_loops.journal import SESSIONS, Replayed
from penstock.agent_loops.tool_runner import CallNames, hash_of
from penstock.tools import ToolConfig
from penstock.tools.parsers import ToolCall
from penstock.transfer_queue import JournalEntry, JournalKind, JournalMismatch, QueueError, QueueUnavailable

SAMPLED = JournalEntry(kind=JournalKind.SAMPLED, context_hash=7)


@pytest.fixture
def next_owner(queue_of, tasks_of):
    """The journal as the next worker has it."""
    (task,) = tasks_of()
    queue = queue_of([task])
    return lambda: EpisodeJournal(queue, queue.lease(task))


async def test_journal_run_name_changes_only_at_restart(next_owner):
    first = next_owner()
    await first.append_naming(SAMPLED)
    name = await first.life()
    second = next_owner()
    assert await second.life() == name
    await second.restart("it strayed")
    assert await second.life() != name
    third = next_owner()
    assert await third.life() == await second.life()
    assert third.take(JournalKind.SAMPLED, 7) is None


async def test_journal_run_name_is_durable_before_use(next_owner):
    name = await next_owner().life()
    then = next_owner()
    assert await then.life() == name
    assert then.take(JournalKind.TOOLS, 0) is None  # the name alone is no tool turn


async def test_journal_keeps_sessions_and_rewards(next_owner):
    first = next_owner()
    for session in ("box-1", "box-2"):
        data = {"results": [], SESSIONS: {"python": session}}
        await first.append(JournalEntry(kind=JournalKind.TOOLS, context_hash=1, data=data))
    await first.keep_rewards({"python": 0.5})
    assert first.tool_rewards == {"python": 0.5}
    second = next_owner()
    assert (second.sessions, second.tool_rewards) == ({"python": "box-2"}, {"python": 0.5})
    await second.restart("it strayed")
    third = next_owner()
    assert (third.sessions, third.tool_rewards) == ({}, None)


async def test_journal_appends_lost_entries_again(queue_of, tasks_of):
    """The queue lost its last second with its machine; the worker lived on. No later entry may follow the hole."""
    (task,) = tasks_of()
    queue = queue_of([task])
    journal = EpisodeJournal(queue, queue.lease(task))
    for number in range(3):
        await journal.append(JournalEntry(kind=JournalKind.TOOLS, context_hash=7, data={"results": [number]}))
    del queue.members[task.task_id].journal[1:]
    await journal.append(JournalEntry(kind=JournalKind.TOOLS, context_hash=7, data={"results": [3]}))
    again = EpisodeJournal(queue, queue.lease(task))
    answers = [again.take(JournalKind.TOOLS, 7) for _ in range(4)]
    assert [entry and entry.data["results"] for entry in answers] == [[0], [1], [2], [3]]


async def test_journal_has_two_writers(queue_of, tasks_of):
    """Two servers serve one episode with one fence: entries follow each other, and none is lost with a machine."""
    (task,) = tasks_of()
    queue = queue_of([task])
    lease = queue.lease(task)
    here, there = EpisodeJournal(queue, lease), EpisodeJournal(queue, lease)
    for number, journal in enumerate((here, there, there, here)):
        await journal.append(JournalEntry(kind=JournalKind.TOOLS, context_hash=number))
    del queue.members[task.task_id].journal[1:]
    await here.append(JournalEntry(kind=JournalKind.TOOLS, context_hash=4))
    await there.append(JournalEntry(kind=JournalKind.TOOLS, context_hash=5))
    assert [entry.context_hash for entry in queue.journals[task.task_id]] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("executed", [True, False])
async def test_journal_goes_on_after_an_unanswered_append(queue_of, tasks_of, executed):
    (task,) = tasks_of()
    queue = queue_of([task])
    journal, put = EpisodeJournal(queue, queue.lease(task)), queue.journal
    await journal.append(SAMPLED)

    async def unanswered(lease, entry, position):
        if executed:
            await put(lease, entry, position)
        raise QueueUnavailable("no answer")

    queue.journal = unanswered
    with pytest.raises(QueueUnavailable):
        await journal.append(JournalEntry(kind=JournalKind.TOOLS, context_hash=1))
    queue.journal = put
    await journal.append(JournalEntry(kind=JournalKind.TOOLS, context_hash=2))
    hashes = [entry.context_hash for entry in queue.journals[task.task_id]]
    assert hashes == ([7, 1, 2] if executed else [7, 2])


def test_names_of_calls_follow_what_is_asked_not_when():
    one, other = [ToolCall("a", {"x": 1})], [ToolCall("b"), ToolCall("b")]
    first, second = CallNames(), CallNames()
    told = [first.of_turn("life", hash_of(turn), turn) for turn in (one, other, one)]
    again = [second.of_turn("life", hash_of(turn), turn) for turn in (other, one, one)]
    assert [*told[0], *told[2], *told[1]] == [*again[1], *again[2], *again[0]]
    assert len({named.name for turn in told for named in turn}) == 4
    assert CallNames().of_turn("another life", hash_of(one), one)[0].name != told[0][0].name


async def test_journal_answers_tool_rewards(queue_of, tasks_of, calculator, monkeypatch):
    """Killed between the tools' release and the trajectory: the next worker has the calls from the journal."""
    asked = []

    async def calc_reward(self, state):
        asked.append(list(state.history))
        return float(len(state.history))

    monkeypatch.setattr(type(calculator), "calc_reward", calc_reward)
    (task,) = tasks_of()
    queue = queue_of([task])

    def box():
        journal = EpisodeJournal(queue, queue.lease(task))
        return ToolBox({"calculator": calculator}, {"calculator": ToolConfig(name="calculator")}, task, journal)

    call = [ToolCall("calculator", {"expression": "1+1"})]
    dead, resumed = box(), None
    await dead.call_all(call)
    resumed = box()
    await resumed.call_all(call)
    assert await resumed.rewards() == {"calculator": 1.0}  # no call was run in it: its state was brought there
    last = box()
    await last.call_all(call)
    assert await last.rewards() == {"calculator": 1.0}
    assert asked == [["1+1"]]
    for one in (dead, resumed, last):
        await one.release()
    assert calculator.open == 0


async def test_journal_hands_the_entries_of_another_reader_over(next_owner):
    first = next_owner()
    for data in ({"request": 1}, {"results": []}, {"request": 2, "results": []}, {}):
        kind = JournalKind.TOOLS if "results" in data else JournalKind.SAMPLED
        await first.append(JournalEntry(kind=kind, context_hash=7, data=data))
    second = next_owner()
    theirs = second.hand_over({"request", "answer"})
    assert [dict(entry.data) for entry in theirs] == [{"request": 1}, {"request": 2, "results": []}]
    assert second.replayed.sampled == 1, "what the other reader replays was not sampled again"
    assert [second.take(kind, 7).data for kind in (JournalKind.TOOLS, JournalKind.SAMPLED)] == [{"results": []}, {}]
    assert second.hand_over({"request"}) == ()


async def test_journal_whose_branches_left_entries_starts_anew(next_owner):
    """Branches take entries in any order; by the end all must be taken, else two runs would be mixed."""
    first = next_owner()
    for number in (1, 2):
        await first.append(JournalEntry(kind=JournalKind.TOOLS, context_hash=number, data={"results": [number]}))
    followed, diverged = next_owner(), next_owner()
    with followed.branching():
        assert followed.take(JournalKind.TOOLS, 3) is None
        assert followed.take(JournalKind.TOOLS, 2) is not None
    followed.take(JournalKind.TOOLS, 1)
    followed.check_followed()
    with diverged.branching():
        assert diverged.take(JournalKind.TOOLS, 3) is None
    with pytest.raises(EpisodeRestart, match="left 2 journal entries"):
        diverged.check_followed()
    with pytest.raises(EpisodeRestart, match="does not hold"):
        diverged.take(JournalKind.TOOLS, 3)


async def test_journal_gives_up_an_append_that_others_always_precede(queue_of, tasks_of):
    (task,) = tasks_of()
    queue = queue_of([task])
    journal = EpisodeJournal(queue, queue.lease(task))

    async def always_behind(lease, _entry, position):
        raise JournalMismatch(lease.episode_id, position, position + 1)

    queue.journal = always_behind
    with pytest.raises(QueueError, match=f"{task.task_id}#0: its journal changed"):
        await journal.append(SAMPLED)


async def test_journal_keeps_the_score_of_a_run(next_owner):
    first = next_owner()
    assert first.score is None
    await first.append(SAMPLED)
    await first.keep_score(RecordedScore("digest", 0.5, {"tests": 2.0}))
    second = next_owner()
    assert first.score == second.score == RecordedScore("digest", 0.5, {"tests": 2.0})
    assert second.take(JournalKind.TOOLS, 0) is None  # the score alone is no tool turn
    await second.restart("it strayed")
    assert second.score is None
    assert next_owner().score is None


async def test_journal_counts_what_it_answers(next_owner):
    first = next_owner()
    for kind, count in ((JournalKind.SAMPLED, 2), (JournalKind.TOOLS, 1)):
        for number in range(count):
            await first.append(JournalEntry(kind=kind, context_hash=number, data={"results": []}))
    second = next_owner()
    for kind, number in ((JournalKind.SAMPLED, 1), (JournalKind.TOOLS, 0), (JournalKind.SAMPLED, 0)):
        assert second.take(kind, number) is not None
    assert second.replayed == Replayed(sampled=2, tools=1, restarts=0)
    await second.restart("it strayed")
    assert second.replayed.restarts == 1
    assert next_owner().replayed == Replayed(sampled=0, tools=0, restarts=0)
