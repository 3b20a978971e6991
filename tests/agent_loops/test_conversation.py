"""A conversation's segments as a loop returns them: which, with which ends, and whose turn rewards."""

from __future__ import annotations

from typing import Any

import pytest
from tests.agent_loops.talking import USER, answer

from penstock.agent_loops import TRUNCATED_LENGTH, TRUNCATED_TURNS, Budget, Conversation
from penstock.transfer_queue import COMPLETED, Outcome


@pytest.fixture
def talk_of(chat_for: Any) -> Any:
    """With this budget."""
    return lambda *budget: Conversation(chat_for("chatml").for_episode(Budget(*budget)), [USER])


def test_conversation_gives_turn_rewards_to_their_segments(chat_for: Any, talk_of: Any) -> None:
    chat, talk = chat_for("chatml"), talk_of(9, 1000)
    talk.go_on(answer(chat, talk.segment), [USER])
    answer(chat, talk.segment)
    talk.restart([USER])
    answer(chat, talk.segment)
    assert talk.num_turns == 3
    outputs = talk.outputs(TRUNCATED_LENGTH, turn_rewards=[0.1, 0.2, 0.3])
    assert [(one.num_turns, one.turn_rewards, one.outcome) for one in outputs] == [
        (2, (0.1, 0.2), COMPLETED),
        (1, (0.3,), TRUNCATED_LENGTH),
    ]


@pytest.mark.parametrize(
    ("turns", "given", "expected"),
    [(1, None, TRUNCATED_TURNS), (9, None, TRUNCATED_LENGTH), (1, COMPLETED, COMPLETED)],
)
def test_conversation_without_room_for_a_restart_is_cut(
    chat_for: Any, talk_of: Any, turns: int, given: Outcome | None, expected: Outcome
) -> None:
    """A segment in which nothing was sampled is left out."""
    chat = chat_for("chatml")
    talk = talk_of(turns, len(chat.encode("46")) + 1)
    answer(chat, talk.segment)
    talk.restart([USER])
    assert talk.done
    assert [(one.num_turns, one.outcome) for one in talk.outputs(given)] == [(1, expected)]


def test_conversation_without_a_reply_is_its_first_segment(talk_of: Any) -> None:
    talk = talk_of(9, 1000)
    talk.restart([USER, USER])
    (output,) = talk.outputs()
    assert (output.num_turns, output.prompt_ids.tolist()) == (0, talk_of(9, 1000).segment.context())
