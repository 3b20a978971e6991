from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from penstock.agent_loops import (
    AgentError,
    Budget,
    EpisodeJournal,
    EpisodeLLM,
    EpisodeRestart,
    InfraFailure,
    SegmentBuilder,
    from_entry,
)
from penstock.agent_loops.llm import first_tokens
from penstock.rollout_server import Chunk, Generation, Sampling
from penstock.testing import FakeClient
from penstock.transfer_queue import JournalEntry, JournalKind


def echo(context: list[int]) -> list[int]:
    return [len(context), 2]


@pytest.fixture
def make(queue_of, tasks_of):
    def build(client, queue=None, *, with_routes=False, **sampling):
        queue = queue or queue_of(tasks_of())
        lease = queue.lease(tasks_of()[0])
        journal = EpisodeJournal(queue, lease)
        return EpisodeLLM(client, lease, journal, Sampling(**sampling), str, with_routes=with_routes), queue

    return build


async def test_the_exact_context_is_sent_and_the_answer_appended(make):
    client = FakeClient(echo, version=3)
    llm, _queue = make(client, max_new_tokens=50)
    segment = SegmentBuilder([10, 11], Budget(4, 20))
    reply = await llm.generate(segment, temperature=0.5)
    assert (reply.token_ids, reply.finish_reason) == ([2, 2], "stop")
    segment.observe([30])
    await llm.generate(segment)
    assert [request.token_ids for request in client.requests] == [[10, 11], [10, 11, 2, 2, 30]]
    assert [request.sampling.temperature for request in client.requests] == [0.5, 1.0]
    assert [request.sampling.max_new_tokens for request in client.requests] == [20, 17]
    assert segment.output().version_spans.tolist() == [[3, 0, 2], [3, 3, 5]]


async def test_members_of_a_group_name_one_prefix_eight_at_a_time(make, queue_of, tasks_of):
    """The name stays in this process: a server has no use for it."""
    client = FakeClient(echo)
    (task,) = tasks_of()
    lease = queue_of([task]).lease(task)
    for member in (0, 7, 8):
        member_lease = replace(lease, member=member)
        llm = EpisodeLLM(client, member_lease, EpisodeJournal(queue_of([task]), member_lease), Sampling(), str)
        await llm.draw([10, 11], 20, {})
    evaluated = replace(lease, task=replace(task, split="eval/1"))
    await EpisodeLLM(client, evaluated, EpisodeJournal(queue_of([task]), evaluated), Sampling(), str).draw([10], 20, {})
    first, seventh, eighth, other = [request.prefix for request in client.requests]
    assert first == seventh != eighth
    assert task.task_id in first
    assert other == ""
    assert "prefix" not in client.requests[0].model_dump_json()


async def test_an_answer_is_journaled_before_the_loop_sees_it(make):
    llm, queue = make(FakeClient(echo))
    segment = SegmentBuilder([10, 11], Budget(4, 20))
    asked = segment.context_hash
    await llm.generate(segment)
    (entry,) = next(iter(queue.journals.values()))
    assert (entry.kind, entry.context_len, entry.context_hash) == (JournalKind.SAMPLED, 2, asked)
    assert entry.ids.tolist() == [2, 2]
    assert entry.data["finish_reason"] == "stop"


async def test_llm_resumes_from_journal_then_samples(make):
    first = FakeClient(echo, version=1)
    llm, queue = make(first)
    segment = SegmentBuilder([10, 11], Budget(4, 20))
    await llm.generate(segment)

    second = FakeClient(echo, version=2)
    again, _ = make(second, queue)
    replayed = SegmentBuilder([10, 11], Budget(4, 20))
    await again.generate(replayed)
    assert second.requests == []
    replayed.observe([30])
    await again.generate(replayed)
    assert len(second.requests) == 1
    assert replayed.output().version_spans.tolist() == [[1, 0, 2], [2, 3, 5]]


async def test_another_context_than_the_journals_restarts_the_episode(make):
    llm, queue = make(FakeClient(echo))
    await llm.generate(SegmentBuilder([10, 11], Budget(4, 20)))
    again, _ = make(FakeClient(echo), queue)
    with pytest.raises(EpisodeRestart):
        await again.generate(SegmentBuilder([10, 12], Budget(4, 20)))
    assert isinstance(again.failure, EpisodeRestart)


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (ConnectionError("no server answered in 120 s"), "rollout: ConnectionError: no server answered in 120 s"),
        (InfraFailure("reward_model", "gone"), "reward_model: gone"),
    ],
)
async def test_llm_client_that_fails_ends_the_episode_by_its_component(make, error, failure):
    """Whatever the loop makes of it."""

    def broken(context):
        raise error

    llm, _ = make(FakeClient(broken))
    with pytest.raises(InfraFailure, match=f"^{failure}$") as caught:
        await llm.generate(SegmentBuilder([1], Budget(4, 20)))
    assert llm.failure is caught.value


async def test_generating_on_a_finished_segment_is_a_bug_of_the_loop(make):
    llm, _ = make(FakeClient(echo))
    with pytest.raises(AgentError, match="done"):
        await llm.generate(SegmentBuilder([1], Budget(0, 20)))


async def test_a_watched_answer_is_the_same_answer(make):
    llm, queue = make(FakeClient(lambda context: [5, 6, 7], version=2))
    seen = []
    watched = await llm.draw([1, 2], 100, {}, lambda chunk: seen.extend(chunk.token_ids))
    assert watched == await llm.draw([1, 2], 100, {})
    assert seen == watched.token_ids
    assert list(queue.journals.values()) == [[]]


async def test_a_watcher_may_end_an_answer_in_the_middle_of_a_chunk(make):
    closed = []

    class Chunks(FakeClient):
        async def stream(self, request):
            try:
                yield Chunk(token_ids=[5, 6], logprobs=[-1, -2], version_spans=[(1, 0, 2)])
                yield Chunk(token_ids=[7, 8, 9], logprobs=[-3, -4, -5], version_spans=[(1, 0, 1), (2, 1, 3)])
                raise AssertionError("asked for more than was wanted")
            finally:
                closed.append(True)

    llm, _queue = make(Chunks(echo))
    answer = await llm.draw([1], 100, {}, lambda chunk: 2 if 7 in chunk.token_ids else None)
    assert (answer.token_ids, answer.logprobs) == ([5, 6, 7, 8], [-1, -2, -3, -4])
    assert (answer.version_spans, answer.finish_reason) == ([(1, 0, 3), (2, 3, 4)], "stop")
    assert closed == [True]


@pytest.mark.parametrize(("with_routes", "known", "asked"), [(True, 1, 1), (True, 9, 2), (False, 1, None)])
async def test_llm_asks_for_the_experts_that_are_not_known(make, with_routes, known, asked):
    """At least for those of the last position, which the next token is sampled from."""
    client = FakeClient(echo)
    llm, _queue = make(client, with_routes=with_routes)
    await llm.draw([1, 2, 3], 100, {}, routed_up_to=known)
    assert client.requests[0].routed_experts_from == asked


async def test_llm_counts_its_calls_also_the_replayed_ones(make):
    class Resumed(FakeClient):
        async def generate(self, request):
            self.requests.append(request)
            return Generation([7, 2], [-0.5, -0.5], [(0, 0, 2)], "stop", continued_over_update=True, resumed=2)

    client = Resumed(echo)
    llm, queue = make(client)
    segment = SegmentBuilder([1], Budget(4, 20))
    for _ in range(2):
        await llm.generate(segment)
        segment.observe([9])
    counts = llm.counts
    assert (counts.calls, counts.continued_over_update, counts.resumed) == (2, 2, 4)
    assert 0 <= counts.latency_s < 600
    assert [request.request_id for request in client.requests] == ["train/00000000#0:1:0", "train/00000000#0:1:1"]
    again, _ = make(Resumed(echo), queue)
    await again.generate(SegmentBuilder([1], Budget(4, 20)))
    assert (again.counts.calls, again.counts.continued_over_update, again.counts.resumed) == (1, 1, 2)
    assert again.counts.latency_s == 0.0


def test_llm_reads_an_entry_without_counts():
    ids = np.array([7], dtype=np.int32)
    spans = np.array([[3, 0, 1]], dtype=np.int32)
    logprobs = np.array([-0.5], dtype=np.float32)
    kind, data = JournalKind.SAMPLED, {"finish_reason": "length"}
    entry = JournalEntry(kind=kind, ids=ids, logprobs=logprobs, version_spans=spans, data=data)
    assert from_entry(entry) == Generation([7], [-0.5], [(3, 0, 1)], "length")


def test_llm_cuts_a_chunk_between_two_versions():
    chunk = Chunk(token_ids=[7, 8, 9], logprobs=[-3, -4, -5], version_spans=[(1, 0, 1), (2, 1, 3)])
    assert first_tokens(chunk, 1).version_spans == [(1, 0, 1)]
    assert first_tokens(chunk, 2).version_spans == [(1, 0, 1), (2, 1, 2)]
