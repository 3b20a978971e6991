from __future__ import annotations

import pytest

from penstock.agent_loops import (
    AgentError,
    Budget,
    EpisodeJournal,
    EpisodeLLM,
    EpisodeRestart,
    FakeClient,
    InfraFailure,
    SegmentBuilder,
)
from penstock.rollout_server import Chunk, Sampling
from penstock.transfer_queue import JournalKind


def echo(context: list[int]) -> list[int]:
    return [len(context), 2]


@pytest.fixture
def make(queue_of, tasks_of):
    def build(client, queue=None, **sampling):
        queue = queue or queue_of(tasks_of())
        lease = queue.lease((queue.waiting or tasks_of())[0])
        journal = EpisodeJournal(queue, lease)
        return EpisodeLLM(client, lease, journal, Sampling(**sampling), str), queue

    return build


async def test_the_exact_context_is_sent_and_the_answer_appended(make):
    client = FakeClient(echo, version=3)
    llm, _queue = make(client, max_new_tokens=50)
    segment = SegmentBuilder([10, 11], Budget(4, 20))
    reply = await llm.generate(segment, temperature=0.5)
    assert (reply.ids, reply.finish_reason) == ([2, 2], "stop")
    segment.observe([30])
    await llm.generate(segment)
    assert [request.token_ids for request in client.requests] == [[10, 11], [10, 11, 2, 2, 30]]
    assert [request.sampling.temperature for request in client.requests] == [0.5, 1.0]
    assert [request.sampling.max_new_tokens for request in client.requests] == [20, 17]
    assert segment.output().version_spans.tolist() == [[3, 0, 2], [3, 3, 5]]


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


async def test_after_a_restart_the_old_path_is_never_followed_again(make):
    llm, queue = make(FakeClient(echo))
    await llm.generate(SegmentBuilder([10, 11], Budget(4, 20)))
    again, _ = make(FakeClient(echo), queue)
    await again._journal.restart("test")
    await again.generate(SegmentBuilder([10, 12], Budget(4, 20)))
    third_client = FakeClient(echo)
    third, _ = make(third_client, queue)
    await third.generate(SegmentBuilder([10, 12], Budget(4, 20)))
    assert third_client.requests == []


async def test_a_client_that_fails_is_the_rollouts_failure(make):
    def broken(context):
        raise ConnectionError("no server answered in 120 s")

    llm, _ = make(FakeClient(broken))
    with pytest.raises(InfraFailure, match="rollout: ConnectionError: no server answered"):
        await llm.generate(SegmentBuilder([1], Budget(4, 20)))


async def test_llm_passes_a_failure_on_by_its_own_component(make):
    def broken(context):
        raise InfraFailure("reward_model", "gone")

    llm, _ = make(FakeClient(broken))
    with pytest.raises(InfraFailure, match=r"^reward_model: gone$") as caught:
        await llm.generate(SegmentBuilder([1], Budget(4, 20)))
    assert llm.failure is caught.value, "it ends the episode, whatever the loop makes of it"


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
