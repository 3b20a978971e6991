"""How much of an episode is one token sequence, and why the rest was not merged.

A segment whose prompt begins with the messages of an earlier one was meant to continue it. If it does not hold the
earlier ids, the history was

    retokenised   the same text, other ids
    retemplated   the same words, other white space, punctuation or order: a call that went through JSON, a lost newline
    rewritten     other words: dropped thinking, a summary
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from penstock.agent_loops.segment import AgentLoopOutput

Mismatch = Literal["retokenised", "retemplated", "rewritten"]
KINDS: tuple[Mismatch, ...] = ("retokenised", "retemplated", "rewritten")
Decode = Callable[[Sequence[int]], str]
WORD = re.compile(r"\w+")


def continuity(outputs: Sequence[AgentLoopOutput], decode: Decode, opening_tokens: int = 0) -> dict[str, float]:
    """Metrics of an episode: the share that was merged, and the cost of the rest.

    ``merged_turns``: share of the turns after the first that continued an existing segment;
    ``mismatch/KIND``: counts. Of prompts that continue an earlier segment and do not hold its ids:
    ``repeated_tokens``, which the trainer computes once more; ``refilled_tokens``, those of them after the first
    difference, which miss the engine's prefix cache. `opening_tokens`: a prompt's last ids, which open
    the reply, and which a template may write differently in histories.
    """
    turns = sum(output.num_turns for output in outputs)
    merged = (turns - len(outputs)) / (turns - 1) if turns > 1 else 1.0
    found = _breaks(outputs, decode, opening_tokens) if len(outputs) > 1 else []
    kinds = Counter(one.kind for one in found)
    return {
        "merged_turns": merged,
        **{f"mismatch/{kind}": float(kinds[kind]) for kind in KINDS},
        "repeated_tokens": float(sum(one.prompt_tokens for one in found)),
        "refilled_tokens": float(sum(one.prompt_tokens - one.shared_tokens for one in found)),
    }


def classify(before: Sequence[int], prompt: Sequence[int], decode: Decode) -> Mismatch | None:
    """How `prompt` differs from the ids `before` it; None: it continues them or is a part of them."""
    shared = min(len(before), len(prompt))
    if list(before[:shared]) == list(prompt[:shared]):
        return None
    old, new = decode(before), decode(prompt)
    if new.startswith(old):
        return "retokenised"
    words, other = WORD.findall(old), WORD.findall(new)
    return "retemplated" if sorted(words) == sorted(other[: len(words)]) else "rewritten"


@dataclass(frozen=True, slots=True)
class _Break:
    """A segment that was meant to continue an earlier one."""

    kind: Mismatch
    prompt_tokens: int
    shared_tokens: int
    """Leading ids that are the earlier segment's."""


def _breaks(outputs: Sequence[AgentLoopOutput], decode: Decode, opening_tokens: int) -> list[_Break]:
    found, earlier = [], _Begun(opening_tokens)
    for output in outputs:
        origin = earlier.origin_of(output)
        if origin is not None and (one := _break(origin, output, decode)):
            found.append(one)
        earlier.add(output)
    return found


class _Begun:
    """Segments so far, by what their prompts begin with. A byte comparison ends at the first difference."""

    def __init__(self, opening_tokens: int) -> None:
        self._opening_bytes = 4 * opening_tokens
        self._all: list[tuple[bytes, int, AgentLoopOutput]] = []

    def add(self, output: AgentLoopOutput) -> None:
        whole = output.prompt_ids.astype("<i4").tobytes()
        self._all.append((whole[: len(whole) - self._opening_bytes], len(whole), output))

    def origin_of(self, output: AgentLoopOutput) -> AgentLoopOutput | None:
        """The newest segment whose messages are a proper prefix of those of `output`."""
        prompt = output.prompt_ids.astype("<i4").tobytes()
        begun = (one for start, size, one in reversed(self._all) if len(prompt) > size and prompt.startswith(start))
        return next(begun, None)


def _break(origin: AgentLoopOutput, output: AgentLoopOutput, decode: Decode) -> _Break | None:
    before = np.concatenate([origin.prompt_ids, origin.response_ids])
    prompt = output.prompt_ids
    kind = classify(before.tolist(), prompt.tolist(), decode)
    if kind is None:
        return None
    size = min(len(before), len(prompt))  # within which they differ: else there is no kind
    return _Break(kind, len(prompt), int(np.argmax(before[:size] != prompt[:size])))
