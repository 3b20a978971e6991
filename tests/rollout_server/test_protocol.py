"""Answers put together from several servers, and spans put together from several chunks."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.rollout_server import AnswerBuilder, Chunk, GenerateRequest, Sampling
from penstock.rollout_server.protocol import slice_spans


def chunk(ids: list[int], version: int, **more: Any) -> Chunk:
    return Chunk(token_ids=ids, logprobs=[-1.0] * len(ids), version_spans=[(version, 0, len(ids))], **more)


def request(count: int = 10) -> GenerateRequest:
    return GenerateRequest(
        token_ids=[1, 2], sampling=Sampling(max_new_tokens=count, stop_token_ids=(9,)), min_version=3
    )


def test_the_next_server_is_asked_with_what_was_sampled_and_for_the_rest() -> None:
    answer = AnswerBuilder(request())
    assert answer.next_request(9.0) == request().model_copy(update={"deadline_s": 9.0})
    answer.add(chunk([5, 6], 3))
    again = answer.next_request(9.0)
    assert again.token_ids == [1, 2, 5, 6]
    assert again.sampling.max_new_tokens == 8
    assert again.min_version == 3
    assert answer.resumed == 0
    answer.next_request(9.0)
    answer.add(chunk([7], 4))
    answer.add(chunk([9], 4, finish_reason="stop"))
    whole = answer.build()
    assert whole.token_ids == [5, 6, 7, 9]
    assert whole.version_spans == [(3, 0, 2), (4, 2, 4)]
    assert (whole.finish_reason, whole.resumed, whole.continued_over_update) == ("stop", 1, False)


@pytest.mark.parametrize(("ids", "reason"), [([5, 9], "stop"), ([5] * 4, "length"), ([5], None)])
def test_a_server_that_died_before_saying_so_had_finished(ids: list[int], reason: str | None) -> None:
    answer = AnswerBuilder(request(4))
    answer.next_request(9.0)
    answer.add(chunk(ids, 3))
    assert answer.finish_reason is None  # until the server is gone, its report may disprove these tokens
    assert answer.finish_by_content() is (reason is not None)
    assert answer.finish_reason == reason


def test_an_abort_is_no_end() -> None:
    answer = AnswerBuilder(request())
    answer.next_request(9.0)
    handed_on = answer.add(chunk([5], 3, finish_reason="abort"))
    assert handed_on is not None
    assert (handed_on.token_ids, handed_on.finish_reason, answer.finish_reason) == ([5], None, None)
    assert answer.add(Chunk(finish_reason="abort")) is None, "the reader of a stream sees no empty chunk"


def test_two_versions_in_one_stream_were_continued_over_an_update() -> None:
    answer = AnswerBuilder(request())
    answer.next_request(9.0)
    answer.add(chunk([5], 3))
    answer.add(chunk([6], 4))
    assert answer.continued_over_update


def test_spans_of_one_version_are_joined() -> None:
    answer = AnswerBuilder(request())
    answer.next_request(9.0)
    for one in (chunk([1, 2], 0), chunk([3], 0), chunk([4], 1, finish_reason="stop")):
        answer.add(one)
    assert answer.token_ids == [1, 2, 3, 4]
    assert answer.spans == [(0, 0, 3), (1, 3, 4)]
    assert answer.finish_reason == "stop"


def test_cuts_become_spans_of_a_slice() -> None:
    cuts = [(0, 5), (10, 6), (20, 8)]
    assert slice_spans(cuts, 0, 25) == [(5, 0, 10), (6, 10, 20), (8, 20, 25)]
    assert slice_spans(cuts, 8, 12) == [(5, 0, 2), (6, 2, 4)]
    assert slice_spans(cuts, 10, 20) == [(6, 0, 10)]
    assert slice_spans(cuts, 3, 3) == []
