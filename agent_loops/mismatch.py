"""Measures how much of an episode is one token sequence, and why the rest was not merged.

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
from typing import Literal, get_args

import numpy as np

from penstock.agent_loops.segment import AgentLoopOutput

Mismatch = Literal["retokenised", "retemplated", "rewritten"]
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
    kinds = Counter[Mismatch]()
    repeated = refilled = 0
    # (prompt without its opening, prompt, segment); a comparison of bytes ends at the first difference
    earlier: list[tuple[bytes, bytes, AgentLoopOutput]] = []
    for output in outputs if len(outputs) > 1 else ():
        prompt = output.prompt_ids.astype("<i4").tobytes()
        # The newest segment whose messages are a proper prefix of this one's.
        begun = (
            one for start, whole, one in reversed(earlier) if len(prompt) > len(whole) and prompt.startswith(start)
        )
        origin = next(begun, None)
        earlier.append((prompt[: len(prompt) - 4 * opening_tokens], prompt, output))
        if origin is None:
            continue
        before = np.concatenate([origin.prompt_ids, origin.response_ids])
        kind = classify(before.tolist(), output.prompt_ids.tolist(), decode)
        if kind is None:
            continue
        size = min(len(before), len(output.prompt_ids))  # within which they differ: else the kind is undefined
        shared = int(np.argmax(before[:size] != output.prompt_ids[:size]))
        kinds[kind] += 1
        repeated += len(output.prompt_ids)
        refilled += len(output.prompt_ids) - shared
    return {
        "merged_turns": merged,
        **{f"mismatch/{kind}": float(kinds[kind]) for kind in get_args(Mismatch)},
        "repeated_tokens": float(repeated),
        "refilled_tokens": float(refilled),
    }


def classify(before: Sequence[int], prompt: Sequence[int], decode: Decode) -> Mismatch | None:
    """Return the kind of difference of `prompt` from the ids `before` it; None: it continues them or is a part of
    them.
    """
    shared = min(len(before), len(prompt))
    if list(before[:shared]) == list(prompt[:shared]):
        return None
    old, new = decode(before), decode(prompt)
    if new.startswith(old):
        return "retokenised"
    words, other = WORD.findall(old), WORD.findall(new)
    return "retemplated" if sorted(words) == sorted(other[: len(words)]) else "rewritten"
