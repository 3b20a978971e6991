"""A policy that answers by what its prompt says, and episodes of one loop."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest

from penstock.agent_loops import AgentConfig, ChatTokens, Episode
from penstock.agent_loops.rewards import RewardFunction
from penstock.testing import FakeClient


@pytest.fixture
def saying(chat_for) -> Callable[..., FakeClient]:
    """A client whose answers are ``says(text of the context)``, cut into tokens at random places."""
    usual, dice = chat_for(), random.Random(3)

    def make(says: Callable[[str], str], chat: ChatTokens = usual, **fields: Any) -> FakeClient:
        def reply(context: list[int]) -> list[int]:
            text = says(chat.decode(context))
            cut = dice.randrange(len(text) + 1)
            return [*chat.encode(text[:cut]), *chat.encode(text[cut:]), chat.turn_end_id]

        return FakeClient(reply, **fields)

    return make


@pytest.fixture
def run_loop(queue_of, tasks_of, parts_of):
    """(outcome, trajectory) of one episode; `queue` given again: the next worker's lease of it."""

    async def go(
        loop, client, tool=None, queue=None, settings=None, chat=None, messages=None, window=0, score=None, **fields
    ):
        queue = queue or queue_of(tasks_of())
        config = {"max_turns": 12, "max_response_tokens": 6000, "max_new_tokens": 1000, "settings": settings or {}}
        parts = parts_of(queue, client, tool, config=AgentConfig(**{**config, **fields}))
        parts = dataclasses.replace(parts, find_loop=lambda name: loop, chat=chat or parts.chat, max_model_len=window)
        if score is not None:
            parts = dataclasses.replace(parts, reward=RewardFunction(score))
        (task,) = tasks_of()
        task = dataclasses.replace(task, messages=messages or task.messages)
        outcome = await Episode(parts, queue.lease(task)).run()
        return outcome, queue.done.get("train/00000000")

    return go


def whole(segment) -> list[int]:
    return [*segment.prompt_ids.tolist(), *segment.response_ids.tolist()]


def check_fed(client: FakeClient, trajectory) -> None:
    """Every context that the engine was fed is the beginning of exactly one segment, id for id."""
    wholes = [whole(segment) for segment in trajectory.segments]
    for request in client.requests:
        assert sum(ids[: len(request.token_ids)] == request.token_ids for ids in wholes) == 1
