"""A recorded episode as a slice: turns, each a model call and what followed it, then the reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.deploy.run_trace.slices import Slice

MODEL, REWARD = "model", "reward"


def episode_slice(record: Mapping[str, Any], step: int) -> Slice | None:
    """None where the record says nothing about times: an older recorder's, or an OpenAI client's episode."""
    began_s, spans = record["extra"].get("began_unix_s"), record["extra"].get("trace")
    if began_s is None or not spans:
        return None
    parts = sorted((_part(began_s, span) for span in spans), key=lambda part: part.start_s)
    ends = [part.end_s for part in parts]
    end_s = max([*ends, began_s + float(record["metrics"].get("latency_s", 0.0))])
    facts = {"reward": record["reward"], "outcome": record["outcome"]["kind"], "turns": record["num_turns"]}
    children = [*_turns([part for part in parts if part.name != REWARD]), *(p for p in parts if p.name == REWARD)]
    return Slice(record["episode_id"], began_s, end_s, {**facts, "step": step}, children)


def _part(began_s: float, span: Sequence[Any]) -> Slice:
    kind, name, start, seconds = span
    title = f"{kind} {name}" if name else kind
    return Slice(title, began_s + start, began_s + start + seconds)


def _turns(parts: Sequence[Slice]) -> list[Slice]:
    """A turn begins with each model call; what comes before the first one stands by itself."""
    turns: list[list[Slice]] = []
    before: list[Slice] = []
    for part in parts:
        if part.name == MODEL:
            turns.append([part])
        else:
            (turns[-1] if turns else before).append(part)
    return [*before, *(_turn(number, turn) for number, turn in enumerate(turns))]


def _turn(number: int, parts: Sequence[Slice]) -> Slice:
    return Slice(f"turn {number}", parts[0].start_s, max(part.end_s for part in parts), {}, parts)
