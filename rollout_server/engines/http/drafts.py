"""Speculative decoding by drafts without a model, and its proof at an engine's start.

    prompts that repeat themselves ──► answers behind drafts: ids, logprobs ──────────────┐
                                       a pass over prompt and answer: logprobs, likeliest ─┴─► equal, or refused

A draft's own weights would stay as they were while the policy's change, so only drafts that are copied from the text
are taken. vLLM's build for CPUs samples other tokens behind them than the policy would: of the likeliest too few.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from penstock.rollout_server.protocol import EngineError

logger = logging.getLogger(__name__)
WITHOUT_MODEL = ("ngram", "suffix")
"""Methods whose drafts are copied from the request, or from earlier answers."""
PROMPTS, PATTERN, REPEATS, ANSWER = 16, 12, 5, 64
"""Prompts of the proof; ids in a prompt's pattern and how often it is repeated; tokens of an answer."""
TOLERANCES = {"float32": (1e-3, 1e-4)}
"""Largest and mean difference of a logprob, by dtype. Kernels of decoding and of a pass over a prompt differ."""
ROUNDED = 0.3, 0.03
"""The same of 16 bits: 0.04 and 0.013 were seen between engines."""
FAR = 5.0
"""Standard deviations from the expected number of likeliest tokens."""


class Sampled(NamedTuple):
    """An answer, with the logprob of each token."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]


class Scored(NamedTuple):
    """A token of a text, as the policy sees it after those before it."""

    logprob: float
    likeliest: int
    likeliest_logprob: float


def draft_method(flags: Mapping[str, Any]) -> str:
    """Returns the method of speculative decoding that an engine's flags choose; empty if there is none."""
    chosen = {name.replace("_", "-"): value for name, value in flags.items() if value not in (None, False)}
    config = chosen.get("speculative-config")
    if isinstance(config, Mapping):
        return str(config.get("method") or "a draft model").lower()
    named = chosen.get("speculative-config.method") or chosen.get("speculative-algorithm")
    if named is None and any(name.startswith("speculative") for name in chosen):
        return "a draft model"
    return str(named or "").lower()


async def check_drafts(
    setting: str,
    *,
    vocabulary: int,
    dtype: str,
    longest: int,
    sample: Callable[[list[int], int], Awaitable[Sampled]],
    score: Callable[[list[int]], Awaitable[Sequence[Scored]]],
) -> None:
    """Samples behind drafts and compares tokens and logprobs with a pass over the finished answers.

    Args:
        setting: names the flags, for the message.
        longest: most tokens of prompt and answer.
        sample: answers ids with that many tokens, at temperature 1.
        score: judges all ids but the first.

    Raises `EngineError` with the figures if they differ.
    """
    pattern = min(PATTERN, max(1, (longest - ANSWER) // REPEATS))
    dice = random.Random(0)
    prompts = [[dice.randrange(vocabulary) for _ in range(pattern)] * REPEATS for _ in range(PROMPTS)]
    answers = await asyncio.gather(*(sample(prompt, min(ANSWER, longest - len(prompt) - 1)) for prompt in prompts))
    judged = [await score([*prompt, *answer.token_ids]) for prompt, answer in zip(prompts, answers, strict=True)]
    scored = [one for prompt, row in zip(prompts, judged, strict=True) for one in row[len(prompt) - 1 :]]
    _check_logprobs(setting, [logprob for answer in answers for logprob in answer.logprobs], scored, dtype)
    _check_tokens(setting, [token for answer in answers for token in answer.token_ids], scored)


def _check_logprobs(setting: str, logprobs: Sequence[float], scored: Sequence[Scored], dtype: str) -> None:
    differences = [abs(own - other.logprob) for own, other in zip(logprobs, scored, strict=True)]
    largest, mean = max(differences), fmean(differences)
    most, most_mean = TOLERANCES.get(dtype, ROUNDED)
    if largest > most or mean > most_mean:
        wrong = sum(one > most for one in differences)
        raise EngineError(
            f"{setting}: behind drafts this engine reports logprobs that tokens were not sampled with: {wrong} of "
            f"{len(differences)} differ by more than {most:g} from a pass over the answer, by up to {largest:.3g}. "
            "Remove it",
            retryable=False,
        )
    logger.info("%s: %d logprobs behind drafts are within %.2g", setting, len(differences), largest)


def _check_tokens(setting: str, token_ids: Sequence[int], scored: Sequence[Scored]) -> None:
    """The number of likeliest tokens has a known mean and variance."""
    chances = [math.exp(one.likeliest_logprob) for one in scored]
    expected, variance = sum(chances), sum(chance * (1 - chance) for chance in chances)
    seen = sum(token == one.likeliest for token, one in zip(token_ids, scored, strict=True))
    if abs(seen - expected) > FAR * math.sqrt(max(1.0, variance)):
        raise EngineError(
            f"{setting}: behind drafts this engine samples other tokens than the policy: {seen} of {len(scored)} were "
            f"the likeliest, {expected:.0f} ± {math.sqrt(variance):.0f} are expected. Remove it",
            retryable=False,
        )
