"""What a turn's tokens cost, early and late in a conversation, beside rendering and tokenising all of it again.

    penstock bench tokens --json

splice     the reply is read for calls and appended, its result rendered as a delta and appended; both contexts hashed
turn       the whole turn in a worker: `llm.generate` (an engine that answers at once, in this process), `call_all`,
           journal in memory, `go_on`. It hands the engine the whole context, as every engine's API asks for it.
rerender   the conversation so far by the chat template and the tokenizer, as is done where ids are not kept

A reply is 900 characters, cut into ids at random places (where no tokenizer would), and a tool call; a result is 1 kB.
Conversations are started one per tick and each takes one turn per tick, so that turns 1, 10 and 100 follow each other
within milliseconds: what disturbs the machine disturbs all alike.

Environment: PENSTOCK_BENCH_ROUNDS (5), PENSTOCK_BENCH_SAMPLES (20, per round), PENSTOCK_BENCH_MODEL (folder or hub name
of a tokenizer with a chat template and Hermes calls; unset: Qwen2.5's template over a BPE that is trained here).
"""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import uvloop

from benchmarks.support.comparison import say
from benchmarks.support.machine import processor
from benchmarks.support.summary import median_of, microseconds
from benchmarks.support.talk import CUTS, RESULT_CHARS, THOUGHT_CHARS, Talk, Talker
from penstock.agent_loops.chat import ChatTokens
from penstock.tools.parsers import get_parser

TURNS = (1, 10, 100)
SAMPLES_PER_ROUND = 20
ROUNDS = 5
SIDES = ("splice", "turn", "rerender")
Samples = dict[str, dict[int, list[float]]]
"""side → turn → seconds"""


def measure() -> dict[str, Any]:
    return uvloop.run(_measure())


async def _measure() -> dict[str, Any]:
    rounds = int(os.environ.get("PENSTOCK_BENCH_ROUNDS", ROUNDS))
    model = os.environ.get("PENSTOCK_BENCH_MODEL", "")
    chat = ChatTokens(_tokenizer(model), get_parser("hermes"))
    talker = Talker(chat, random.Random(4711))
    samples = int(os.environ.get("PENSTOCK_BENCH_SAMPLES", SAMPLES_PER_ROUND))
    await talker.open(max(TURNS) + rounds * samples)
    talks: deque[Talk] = deque(maxlen=max(TURNS))
    await _ticks(talker, talks, max(TURNS))
    taken = []
    for number in range(rounds):
        taken.append(await _ticks(talker, talks, samples))
        say(f"tokens: round {number + 1} of {rounds}")
    figures = {side: _figures([one[side] for one in taken]) for side in SIDES}
    figures["context_tokens"] = {
        f"turn_{turn}": tokens for turn, tokens in talker.context_tokens.items() if turn in TURNS
    }
    return {
        "bench": "tokens",
        "ratio": _ratios(taken),
        "figures": figures,
        "setup": {**_setup(model, chat), "rounds": rounds, "samples_per_turn_and_round": samples},
    }


def _tokenizer(model: str) -> Any:
    if not model:
        from benchmarks.support.tokenizer import trained_tokenizer

        return trained_tokenizer()
    from penstock.agent_loops.loading import load_tokenizer

    return load_tokenizer(model)


async def _ticks(talker: Talker, talks: deque[Talk], count: int) -> Samples:
    """In each tick a conversation begins and every one takes a turn; at `max(TURNS)` of them the oldest ends."""
    samples: Samples = {side: {turn: [] for turn in TURNS} for side in SIDES}
    for _ in range(count):
        talks.append(talker.begin())
        sampled = len(talks) == max(TURNS)
        for talk in talks:
            took = await talker.take_turn(talk, rerender=sampled and talk.turns + 1 in TURNS)
            if sampled and talk.turns in TURNS:
                for side in SIDES:
                    samples[side][talk.turns].append(took[side])
    return samples


def _figures(rounds: Sequence[dict[int, list[float]]]) -> dict[str, dict[str, float]]:
    return {
        f"turn_{turn}": {
            "p50_us": microseconds(median_of([samples[turn] for samples in rounds], 0.5)),
            "p90_us": microseconds(median_of([samples[turn] for samples in rounds], 0.9)),
        }
        for turn in TURNS
    }


def _ratios(rounds: Sequence[Samples]) -> dict[str, float]:
    """Of the medians of the rounds' medians."""
    cost = {
        side: {turn: median_of([samples[side][turn] for samples in rounds], 0.5) for turn in TURNS} for side in SIDES
    }
    growth = {f"{side}_turn{turn}_over_turn1": cost[side][turn] / cost[side][1] for side in SIDES for turn in TURNS[1:]}
    beside = {f"splice_over_rerender_turn{turn}": cost["splice"][turn] / cost["rerender"][turn] for turn in TURNS}
    return {name: round(value, 4) for name, value in {**growth, **beside}.items()}


def _setup(model: str, chat: ChatTokens) -> dict[str, Any]:
    return {
        **processor(),
        "thought_chars_per_turn": THOUGHT_CHARS,
        "cuts_in_a_reply": CUTS,
        "tool_result_chars_per_turn": RESULT_CHARS,
        "tokenizer": model or "byte-level BPE trained here",
        "vocabulary": len(chat.tokenizer),
    }
