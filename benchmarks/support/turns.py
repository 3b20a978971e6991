"""Episodes of several turns at once: what is sampled and what a tool said become the next turn's context."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

from penstock.rollout_server import GenerateRequest, RolloutClient, Sampling


@dataclass(frozen=True)
class Turns:
    episodes: int
    turns: int
    prompt_tokens: int
    answer_tokens: int
    observed_tokens: int
    """What a tool adds after each answer."""
    vocab: int
    sticky: bool
    """Requests carry their episode's name, which keeps them at one server; without it each goes to the least loaded."""
    group_size: int = 1
    """Episodes with the same prompt."""
    prefixes: bool = False
    """Requests name the prompt of their group, as an agent worker's do."""
    seed: int = 0


async def run_turns(turns: Turns, client: RolloutClient) -> dict[str, Any]:
    """All episodes at once, each turn after turn; contexts of different groups have nothing in common."""
    sampled = await asyncio.gather(*(_episode(turns, number, client) for number in range(turns.episodes)))
    return {"tokens": sum(sampled)}


async def _episode(turns: Turns, number: int, client: RolloutClient) -> int:
    kind = f"{turns.seed}/{turns.sticky}/{turns.group_size}/{turns.prefixes}"
    group = f"{kind}/{number // turns.group_size}"
    chance = random.Random(f"{kind}/{number}")
    context = _ids(random.Random(f"{group}/prompt"), turns.prompt_tokens, turns.vocab)
    name, prefix = f"{kind}/{number}" if turns.sticky else "", group if turns.prefixes else ""
    sampling, count = Sampling(max_new_tokens=turns.answer_tokens), 0
    for _ in range(turns.turns):
        # Tools take their time, each another: turns of different episodes come to be interleaved.
        await asyncio.sleep(chance.uniform(0.0, 0.2))
        request = GenerateRequest(token_ids=context, sampling=sampling, episode_id=name, prefix=prefix)
        answer = await client.generate(request)
        count += len(answer.token_ids)
        context = [*context, *answer.token_ids, *_ids(chance, turns.observed_tokens, turns.vocab)]
    return count


def _ids(chance: random.Random, count: int, vocab: int) -> list[int]:
    return [chance.randrange(2, vocab) for _ in range(count)]
