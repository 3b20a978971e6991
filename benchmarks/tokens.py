"""What a turn's tokens cost, early and late in a conversation, beside rendering and tokenising all of it again.

    penstock bench tokens --json

splice     the reply is read for calls and appended, its result rendered as a delta and appended; both contexts hashed
rerender   the conversation so far by the chat template and the tokenizer, as is done where ids are not kept

A reply is 900 characters, cut into ids at random places (where no tokenizer would), and a tool call; a result is 1 kB.
Conversations are started one per tick and each takes one turn per tick, so that turns 1, 10 and 100 follow each other
within milliseconds: what disturbs the machine disturbs all alike.

Environment: PENSTOCK_BENCH_ROUNDS (5), PENSTOCK_BENCH_SAMPLES (20, per round), PENSTOCK_BENCH_TURNS (1,10,100) and
PENSTOCK_BENCH_MODEL, folder or hub name of a tokenizer with a chat template and Hermes calls (unset: Qwen2.5's template
over a BPE that is trained here).
"""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.support.comparison import say
from benchmarks.support.measure import median_of, microseconds, processor
from benchmarks.support.talk import CUTS, RESULT_CHARS, THOUGHT_CHARS, Talk, Talker
from penstock.agent_loops import ChatTokens
from penstock.tools.parsers import get_parser

SIDES = ("splice", "rerender")
Samples = dict[str, dict[int, list[float]]]
"""side → turn → seconds"""


@dataclass(frozen=True)
class TokensExtent:
    """How much is measured, from the environment."""

    turns: tuple[int, ...]
    rounds: int
    samples: int
    model: str

    @classmethod
    def read(cls) -> TokensExtent:
        turns = os.environ.get("PENSTOCK_BENCH_TURNS", "1,10,100").split(",")
        return cls(
            tuple(int(turn) for turn in turns),
            int(os.environ.get("PENSTOCK_BENCH_ROUNDS", "5")),
            int(os.environ.get("PENSTOCK_BENCH_SAMPLES", "20")),
            os.environ.get("PENSTOCK_BENCH_MODEL", ""),
        )


def measure() -> dict[str, Any]:
    extent = TokensExtent.read()
    chat = ChatTokens(_tokenizer(extent.model), get_parser("hermes"))
    talker = Talker(chat, random.Random(4711))
    last = max(extent.turns)
    talks: deque[Talk] = deque(maxlen=last)
    _ticks(talker, talks, extent.turns, last)
    taken = []
    for number in range(extent.rounds):
        taken.append(_ticks(talker, talks, extent.turns, extent.samples))
        say(f"tokens: round {number + 1} of {extent.rounds}")
    figures = {side: _figures([one[side] for one in taken]) for side in SIDES}
    figures["context_tokens"] = {f"turn_{turn}": talker.context_tokens[turn] for turn in extent.turns}
    return {"bench": "tokens", "ratio": _ratios(taken), "figures": figures, "setup": _setup(extent, chat)}


def _tokenizer(model: str) -> Any:
    if not model:
        from benchmarks.support.model import trained_tokenizer

        return trained_tokenizer()
    from penstock.agent_loops.chat import load_tokenizer

    return load_tokenizer(model)


def _ticks(talker: Talker, talks: deque[Talk], turns: Sequence[int], count: int) -> Samples:
    """In each tick a conversation begins and every one takes a turn; after its last one the oldest ends."""
    samples: Samples = {side: {turn: [] for turn in turns} for side in SIDES}
    for _ in range(count):
        talks.append(talker.begin())
        sampled = len(talks) == max(turns)
        for talk in talks:
            took = talker.take_turn(talk, rerender=sampled and talk.turns + 1 in turns)
            if sampled and talk.turns in turns:
                for side in SIDES:
                    samples[side][talk.turns].append(took[side])
    return samples


def _figures(rounds: Sequence[dict[int, list[float]]]) -> dict[str, dict[str, float]]:
    return {
        f"turn_{turn}": {
            "p50_us": microseconds(median_of([samples[turn] for samples in rounds], 0.5)),
            "p90_us": microseconds(median_of([samples[turn] for samples in rounds], 0.9)),
        }
        for turn in rounds[0]
    }


def _ratios(rounds: Sequence[Samples]) -> dict[str, float]:
    """Of the medians of the rounds' medians."""
    first, *later = rounds[0]["splice"]
    cost = {
        side: {turn: median_of([one[side][turn] for one in rounds], 0.5) for turn in rounds[0][side]} for side in SIDES
    }
    growth = {f"{side}_turn{t}_over_turn{first}": cost[side][t] / cost[side][first] for side in SIDES for t in later}
    beside = {f"splice_over_rerender_turn{t}": cost["splice"][t] / cost["rerender"][t] for t in (first, *later)}
    return {name: round(value, 4) for name, value in {**growth, **beside}.items()}


def _setup(extent: TokensExtent, chat: ChatTokens) -> dict[str, Any]:
    return {
        **processor(),
        **asdict(extent),
        "model": extent.model or "byte-level BPE trained here",
        "vocabulary": len(chat.tokenizer),
        "thought_chars_per_turn": THOUGHT_CHARS,
        "cuts_in_a_reply": CUTS,
        "tool_result_chars_per_turn": RESULT_CHARS,
    }
