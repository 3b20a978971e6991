from __future__ import annotations

import itertools

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from tests.agent_loops.talking import say

from penstock.agent_loops import TRUNCATED_LENGTH, TRUNCATED_TURNS, AgentError, Budget, SegmentBuilder
from penstock.agent_loops.token_row import SHARED
from penstock.transfer_queue import COMPLETED

STOP = 2
ids_lists = st.lists(st.integers(0, 500), min_size=1, max_size=8)


@given(prompt=ids_lists, turns=st.lists(st.tuples(ids_lists, ids_lists), max_size=5))
def test_output_is_what_happened_in_order(prompt, turns):
    segment = SegmentBuilder(prompt, Budget(100, 10_000), {STOP})
    contexts = [segment.context()]
    for number, (sampled, observed) in enumerate(turns):
        say(segment, sampled, version=number)
        contexts.append(segment.context())
        segment.observe(observed)
        contexts.append(segment.context())
    for shorter, longer in itertools.pairwise(contexts):
        assert longer[: len(shorter)] == shorter
    output = segment.output()
    assert [*output.prompt_ids, *output.response_ids] == contexts[-1]
    sampled_ids = [token for sampled, _ in turns for token in sampled]
    assert list(output.response_ids[output.response_mask == 1]) == sampled_ids
    assert [row[2] - row[1] for row in output.version_spans.tolist()] == [len(sampled) for sampled, _ in turns]
    assert (output.response_logprobs[output.response_mask == 0] == 0).all()
    assert output.num_turns == len(turns)
    whole = np.array(contexts[-1], dtype="<i4").tobytes()
    assert segment.context_hash == xxhash.xxh3_64_intdigest(whole)


def test_a_context_whose_reader_is_still_there_stops_no_growth(monkeypatch):
    """A debugger or profiler that looks at a frame holds what the frame reads from."""
    held = []
    monkeypatch.setattr(SHARED, "of", lambda ids: held.append(ids) or ids.tolist())
    segment = SegmentBuilder([5], Budget(100, 10_000), {STOP})
    assert segment.context() == [5]
    segment.observe([6])
    assert segment.context() == [5, 6]
    assert held[0].tolist() == [5]


@pytest.mark.parametrize(
    ("sampled", "observed", "response"),
    [
        ([7, STOP], [STOP, 8], [7, STOP, 8]),
        ([7], [STOP, 8], [7, STOP, 8]),
        ([7], [7, 8], [7, 7, 8]),  # an ordinary token that happens to be equal
    ],
)
def test_segment_observe_does_not_repeat_a_sampled_stop(sampled, observed, response):
    segment = SegmentBuilder([1], Budget(5, 100), {STOP})
    say(segment, sampled)
    segment.observe(observed)
    assert segment.output().response_ids.tolist() == response


def test_the_ending_is_read_off_the_segment():
    finished = SegmentBuilder([1], Budget(2, 100))
    say(finished, [7, STOP])
    assert finished.output().outcome == COMPLETED

    cut = SegmentBuilder([1], Budget(2, 100))
    say(cut, [7, 8], reason="length")
    assert cut.done
    assert cut.output().outcome == TRUNCATED_LENGTH

    out_of_turns = SegmentBuilder([1], Budget(1, 100))
    say(out_of_turns, [7, STOP])
    out_of_turns.observe([9])
    assert out_of_turns.done
    assert out_of_turns.output().outcome == TRUNCATED_TURNS


def test_segment_observe_refuses_without_room():
    segment = SegmentBuilder([1], Budget(5, 6), {STOP})
    say(segment, [7, STOP])
    assert segment.observe([9, 9, 9, 9]) is False
    assert segment.done
    assert segment.output().response_ids.tolist() == [7, STOP]
    assert segment.output().outcome == TRUNCATED_LENGTH


def test_observe_refuses_what_outgrows_the_window():
    """An answer needs a token: the engine would refuse a context that fills its window."""
    for fed, fits in ((4, True), (5, False)):
        segment = SegmentBuilder([1, 2, 3], Budget(5, 1000, window=10), {STOP})
        say(segment, [7, STOP])
        assert segment.observe([9] * fed) is fits
        assert segment.done is not fits
        assert (segment.context_len, segment.output().outcome == TRUNCATED_LENGTH) == (5 + fed * fits, True)


def test_segments_of_one_episode_share_its_budget():
    budget = Budget(2, 100)
    first, second = SegmentBuilder([1], budget), SegmentBuilder([2], budget)
    say(first, [7])
    assert not second.done
    say(second, [7])
    assert first.done
    assert second.done


def test_an_empty_prompt_is_refused():
    with pytest.raises(AgentError, match="at least one prompt token"):
        SegmentBuilder([], Budget(1, 1))


@pytest.mark.parametrize("token", [2**20, 2**31 - 1, -1])
def test_segment_keeps_ids_of_no_vocabulary(token):
    """Ids are shared up to a million; beyond that they are as exact."""
    segment = SegmentBuilder([1, token], Budget(2, 100))
    assert segment.context() == [1, token]


def test_segment_that_ends_in_what_it_read_is_cut():
    """With turns left, the answer to it is what is missing; a segment that was never sampled is whole."""
    segment = SegmentBuilder([1], Budget(2, 100))
    assert segment.output().outcome == COMPLETED
    say(segment, [7, STOP])
    segment.observe([9])
    assert segment.output().outcome == TRUNCATED_LENGTH


def test_segment_fed_ids_draw_on_the_budget():
    segment = SegmentBuilder([1], Budget(5, 10))
    segment.append_fed([7, 8, 9])
    assert segment.context() == [1, 7, 8, 9]
    assert (segment.budget.response_tokens, segment.budget.turns, segment.budget.tokens_left) == (3, 0, 7)


@pytest.mark.parametrize(("prompt_len", "fits"), [(9, True), (10, False)])
def test_segment_makes_room_within_the_window(prompt_len, fits):
    """For the next one, of which 3 ids are new; its answer needs a token."""
    segment = SegmentBuilder([1, 2], Budget(5, 100, window=10))
    say(segment, [7, STOP])
    assert segment.make_room(3, prompt_len) is fits
    assert (segment.done, segment.budget.response_tokens) == (not fits, 5 if fits else 2)
    assert not SegmentBuilder([1], Budget(0, 100)).make_room(1, 2), "out of turns"


def test_segment_context_is_searched_once():
    segment = SegmentBuilder([1, 2], Budget(5, 100))
    assert segment.take_unsearched() == [1, 2]
    say(segment, [7, STOP])
    assert segment.take_unsearched() == [7, STOP]
    assert segment.take_unsearched() == []


def test_segment_contexts_share_their_ints():
    """Also at the ids at which the table of shared ones grows."""
    for token in (1000, *(1 << bits for bits in range(10, 18))):
        (first,), (second,) = (SegmentBuilder([token], Budget(1, 1)).context() for _ in range(2))
        assert first == token
        assert first is second
