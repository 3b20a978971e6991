from __future__ import annotations

import pytest
from tests.agent_loops.families import FAMILIES
from tests.agent_loops.talking import say

from penstock.agent_loops import Budget, SegmentBuilder, continuity
from penstock.agent_loops.mismatch import classify

CHAT = FAMILIES["qwen2_5"].chat()
START = CHAT.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
ODD = [token for letter in '{"a": 46, "b": true}' for token in CHAT.encode(letter)]


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        ([*START, *ODD, *CHAT.encode("<|im_end|>")], None),
        (START, None),
        ([*START, *CHAT.encode('{"a": 46, "b": true}<|im_end|>\n')], "retokenised"),
        ([*START, *CHAT.encode('{"b":true,"a":46}<|im_end|>\n')], "retemplated"),
        ([*START, *CHAT.encode("a summary<|im_end|>\n")], "rewritten"),
    ],
)
def test_a_history_that_is_not_the_one_before_is_named(prompt, kind):
    assert classify([*START, *ODD], prompt, CHAT.decode) == kind


def output(prompt: list[int], turns: int = 1):
    segment = SegmentBuilder(prompt, Budget(9, 999))
    for _ in range(turns):
        say(segment, ODD)
        segment.observe(CHAT.encode("\n"))
    return segment.output()


def shared_with_odd(prompt: list[int]) -> int:
    """Leading ids of `prompt` behind START that are those of the first answer."""
    return next(at for at, (a, b) in enumerate(zip(prompt[len(START) :], ODD, strict=False)) if a != b)


def test_counts_of_an_episode():
    again = [*START, *CHAT.encode('{"a": 46, "b": true}\n!')]
    sub_agent = CHAT.encode("<|im_start|>user\nother<|im_end|>\n")
    told = continuity([output(START, 2), output(sub_agent), output([*again, 5])], CHAT.decode)
    assert told == {
        "merged_turns": pytest.approx(1 / 3),
        "mismatch/retokenised": 0,
        "mismatch/retemplated": 0,
        "mismatch/rewritten": 1,
        "repeated_tokens": len(again) + 1,
        "refilled_tokens": len(again) + 1 - len(START) - shared_with_odd(again),
    }
    first = continuity([output(START), output(again)], CHAT.decode)
    assert first["mismatch/retokenised"] == 1
    assert first["merged_turns"] == 0


def test_one_segment_is_all_merged():
    assert continuity([output(START)], CHAT.decode)["merged_turns"] == 1.0
    assert continuity([output(START, 5)], CHAT.decode)["merged_turns"] == 1.0


def test_an_opening_that_histories_write_otherwise_is_no_break():
    """The last ids of a prompt open the reply; what stands before them must be the same, to the last byte."""
    start, opening = [*range(10, 20)], [*range(300, 304)]
    first = output([*start, *opening])
    other_opening = [*start, *range(310, 314)]
    behind = output([*other_opening, *CHAT.encode("46")])
    assert continuity([first, behind], CHAT.decode, opening_tokens=4)["mismatch/rewritten"] == 1
    assert continuity([first, behind], CHAT.decode)["mismatch/rewritten"] == 0
    again = output(other_opening)
    assert continuity([first, again], CHAT.decode, opening_tokens=4)["repeated_tokens"] == 0, "not longer"
    other = output([*start[:-1], start[-1] + 256, *opening, 5])
    assert continuity([first, other], CHAT.decode, opening_tokens=4)["repeated_tokens"] == 0, "another conversation"
