"""How much of an episode is one token sequence, and why what is not was not merged.

A segment whose prompt begins with the prompt of an earlier one was meant to go on from it. Where it does not hold the
earlier ids, the history was

    retokenised   the same text, other ids
    retemplated   the same words, other white space, punctuation or order: a call that went through JSON, a lost newline
    rewritten     other words: dropped thinking, a summary
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal

from penstock.agent_loops.base import AgentLoopOutput

Mismatch = Literal["retokenised", "retemplated", "rewritten"]
KINDS: tuple[Mismatch, ...] = ("retokenised", "retemplated", "rewritten")
Decode = Callable[[Sequence[int]], str]
WORD = re.compile(r"\w+")


def continuity(outputs: Sequence[AgentLoopOutput], decode: Decode) -> dict[str, float]:
    """Metrics of an episode: how much was merged, and what was not.

    ``merged_turns``: share of the turns after the first that went on in a segment that was there;
    ``mismatch/KIND``: counts.
    """
    turns = sum(output.num_turns for output in outputs)
    merged = (turns - len(outputs)) / (turns - 1) if turns > 1 else 1.0
    found = [kind for index in range(1, len(outputs)) if (kind := _of_segment(outputs[: index + 1], decode))]
    return {"merged_turns": merged, **{f"mismatch/{kind}": float(found.count(kind)) for kind in KINDS}}


def classify(before: Sequence[int], prompt: Sequence[int], decode: Decode) -> Mismatch | None:
    """How `prompt` differs from the ids `before` it; None where it goes on from them or is a part of them."""
    shared = min(len(before), len(prompt))
    if list(before[:shared]) == list(prompt[:shared]):
        return None
    old, new = decode(before), decode(prompt)
    if new.startswith(old):
        return "retokenised"
    words, other = WORD.findall(old), WORD.findall(new)
    return "retemplated" if sorted(words) == sorted(other[: len(words)]) else "rewritten"


def _of_segment(outputs: Sequence[AgentLoopOutput], decode: Decode) -> Mismatch | None:
    """Of the last output, against the newest earlier one that it goes on from."""
    *earlier, last = outputs
    prompt = last.prompt_ids.tolist()
    for output in reversed(earlier):
        begin = output.prompt_ids.tolist()
        if len(prompt) > len(begin) and prompt[: len(begin)] == begin:
            return classify([*begin, *output.response_ids.tolist()], prompt, decode)
    return None
