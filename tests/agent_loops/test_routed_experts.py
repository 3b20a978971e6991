"""The experts that read each token stay beside it, from the client to the trajectory, whatever is appended."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.agent_loops import Budget, SegmentBuilder, from_entry, to_entry
from penstock.agent_loops.llm import first_tokens
from penstock.rollout_server import AnswerBuilder, Chunk, GenerateRequest, Generation, Sampling, encode_rows
from penstock.testing import fake_experts

ids_lists = st.lists(st.integers(0, 500), min_size=1, max_size=8)


def rows_of(ids: list[int], version: int) -> NDArray[np.uint8]:
    """[len(ids), 2, 2] as an engine of `version` tells them."""
    return np.stack([fake_experts(token, version) for token in ids])


@dataclass
class Turn:
    """One call: an answer, by one server or two, and what is observed afterwards."""

    sampled: list[int]
    observed: list[int]
    version: int
    told: bool
    cut: int | None
    """Of so many tokens the first server was killed; None: it was not."""


turns = st.builds(
    Turn, ids_lists, ids_lists, version=st.integers(0, 3), told=st.booleans(), cut=st.none() | st.integers(1, 7)
)


def answer(context: list[int], start: int, turn: Turn, chunks: list[int]) -> Generation:
    """As a client joins it. `chunks`: lengths of the chunks."""
    sampling = Sampling(max_new_tokens=len(turn.sampled))
    builder = AnswerBuilder(GenerateRequest(token_ids=context, sampling=sampling, routed_experts_from=start))
    pieces, sent = [turn.sampled], 0
    if turn.cut is not None and turn.cut < len(turn.sampled):
        pieces = [turn.sampled[: turn.cut], turn.sampled[turn.cut :]]
    for number, piece in enumerate(pieces):
        request = builder.next_request(1.0)
        given, told, whole = list(request.token_ids), request.routed_experts_from, [*request.token_ids, *piece]
        assert told is not None
        for size in [*chunks, len(piece)]:
            new = piece[len(given) - len(request.token_ids) :][:size]
            if not new:
                break
            given += new
            rows = rows_of(whole[told : len(given) - 1], turn.version + number)
            told = len(given) - 1
            sent += len(new)
            builder.add(
                Chunk(
                    token_ids=new,
                    logprobs=[-0.5] * len(new),
                    version_spans=[(turn.version + number, 0, len(new))],
                    finish_reason="stop" if sent == len(turn.sampled) else None,
                    routed_experts=[encode_rows(rows)] if turn.told else [],
                )
            )
    return builder.build()


@settings(max_examples=200)
@given(prompt=ids_lists, played=st.lists(turns, max_size=4), chunks=st.lists(st.integers(1, 3), max_size=3))
def test_each_token_keeps_the_experts_of_the_pass_that_read_it(prompt, played, chunks):
    segment = SegmentBuilder(prompt, Budget(100, 10_000))
    expected: dict[int, NDArray[np.uint8]] = {}
    for turn in played:
        context, start = segment.context(), min(segment.routed_up_to, segment.context_len - 1)
        sent = answer(context, start, turn, chunks)
        generation = from_entry(to_entry(sent, (0, 0), {}))
        versions = [version for version, first, end in sent.version_spans for _ in range(first, end)]
        if turn.told:
            whole = context + turn.sampled
            for position in range(start, len(whole) - 1):
                version = versions[max(0, position - len(context) + 1)]
                expected.setdefault(position, fake_experts(whole[position], version))
        segment.append_sampled(generation)
        segment.append_fed(turn.observed)
    tokens = segment.output()
    if not expected:
        assert tokens.routed_experts is None
        return
    assert tokens.routed_experts is not None
    assert len(tokens.routed_experts) == len(tokens.prompt_ids) + len(tokens.response_ids)
    for position, rows in enumerate(tokens.routed_experts):
        np.testing.assert_array_equal(rows, expected.get(position, np.zeros((2, 2), dtype=np.uint8)))


@given(ids=ids_lists, sampled=ids_lists, keep=st.integers(1, 8))
def test_a_chunk_that_is_cut_keeps_the_rows_before_its_last_token(ids, sampled, keep):
    whole = [*ids, *sampled]
    rows = rows_of(whole[:-1], 0)
    chunk = Chunk(token_ids=sampled, logprobs=[-0.5] * len(sampled), routed_experts=[encode_rows(rows)])
    kept = first_tokens(chunk, keep)
    builder = AnswerBuilder(GenerateRequest(token_ids=ids, routed_experts_from=0))
    builder.next_request(1.0)
    builder.add(kept)
    found = builder.build().routed_experts
    assert found is not None
    np.testing.assert_array_equal(found, rows[: len(ids) + len(kept.token_ids) - 1])


def test_what_a_disproved_server_told_is_taken_back():
    builder = AnswerBuilder(GenerateRequest(token_ids=[1, 2], routed_experts_from=0))
    builder.next_request(1.0)
    for token, last in ((3, [1, 2]), (4, [3])):
        chunk = Chunk(
            token_ids=[token],
            logprobs=[-0.5],
            version_spans=[(0, 0, 1)],
            routed_experts=[encode_rows(rows_of(last, 9))],
        )
        builder.add(chunk)
    assert builder.take_back() == 2
    builder.next_request(1.0)
    chunk = Chunk(
        token_ids=[5],
        logprobs=[-0.5],
        version_spans=[(1, 0, 1)],
        finish_reason="stop",
        routed_experts=[encode_rows(rows_of([1, 2], 1))],
    )
    builder.add(chunk)
    np.testing.assert_array_equal(builder.build().routed_experts, rows_of([1, 2], 1))
