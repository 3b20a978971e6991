"""One choice of a call: sampled, shown as it comes, written down, closed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.agent_loops import Watch
from penstock.gateway.call import Call
from penstock.gateway.history import Place
from penstock.gateway.record import Record
from penstock.gateway.wire import AnswerReader, Ask
from penstock.rollout_server import Chunk

SEEDS = 2**63
"""OpenAI's seeds may be negative, an engine's are not."""


async def sample(record: Record, call: Call, place: Place, index: int, room: int) -> None:
    """Choice `index`, of `room` tokens at most. Raises `InfraFailure`, `QueueError`, `ValidationError`."""
    reader = AnswerReader(call.ask, call.head, index, record.text_of)
    watch = _watch(call, reader, index) if _must_watch(call.ask) else None
    generation = await record.llm.draw(list(place.context), room, _overrides(call.ask, index), watch)
    if watch is None:
        reader.feed(generation.token_ids, generation.logprobs)
    choice = reader.finish("length" if generation.finish_reason == "length" else "stop")
    await record.write(call, place, choice, generation)
    call.close(choice)


def _overrides(ask: Ask, index: int) -> Mapping[str, Any]:
    """Fields of `Sampling`; each choice has a seed of its own."""
    if "seed" not in ask.sampling:
        return ask.sampling
    return {**ask.sampling, "seed": (ask.sampling["seed"] + index) % SEEDS}


def _must_watch(ask: Ask) -> bool:
    """Whether somebody reads along, or the answer may end before the engine ends it."""
    return ask.stream or bool(ask.stop) or (ask.reads_calls and not ask.parallel_tool_calls)


def _watch(call: Call, reader: AnswerReader, index: int) -> Watch:
    def watch(chunk: Chunk) -> int | None:
        taken = len(reader.token_ids)
        call.show(index, reader.feed(chunk.token_ids, chunk.logprobs))
        kept = len(reader.token_ids) - taken
        ends_here = reader.stopped and (kept < len(chunk.token_ids) or chunk.finish_reason != "stop")
        return kept if ends_here else None

    return watch
