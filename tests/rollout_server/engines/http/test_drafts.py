"""Logprobs behind drafts are compared with a pass over the finished answer before an engine is used."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.rollout_server import EngineError
from penstock.rollout_server.engines.http.drafts import Sampled, Scored, check_drafts, draft_method

VOCABULARY = 50


def logprob_of(place: int) -> float:
    return -0.1 * (1 + place % 7)


class Answers:
    """An engine whose likeliest token, 1, at place p of a text has `logprob_of` p, and is sampled with that chance.

    `shift`: of the logprob of the last token of each answer. `share`: tokens in which another one takes its place.
    """

    def __init__(self, shift: float = 0.0, share: float = 0.0) -> None:
        self.shift, self.share = shift, share
        self.prompts: list[list[int]] = []
        self.dice = random.Random(1)

    async def sample(self, token_ids: list[int], count: int) -> Sampled:
        self.prompts.append(token_ids)
        chances = [math.exp(logprob_of(len(token_ids) + number)) * (1 - self.share) for number in range(count)]
        tokens = [1 if self.dice.random() < chance else 2 for chance in chances]
        logprobs = [one.logprob for one in (await self.score([*token_ids, *tokens]))[len(token_ids) - 1 :]]
        logprobs[-1] += self.shift
        return Sampled(tokens, logprobs)

    async def score(self, token_ids: list[int]) -> Sequence[Scored]:
        likeliest = [logprob_of(place) for place in range(1, len(token_ids))]
        return [
            Scored(top if token == 1 else math.log(1 - math.exp(top)), 1, top)
            for token, top in zip(token_ids[1:], likeliest, strict=True)
        ]

    async def check(self, dtype: str, longest: int) -> None:
        await check_drafts(
            "rollout.vllm_args: drafts",
            vocabulary=VOCABULARY,
            dtype=dtype,
            longest=longest,
            sample=self.sample,
            score=self.score,
        )


@pytest.mark.parametrize("longest", [60, 128, 4096])
async def test_equal_logprobs_pass_at_any_length(longest: int) -> None:
    answers = Answers()
    await answers.check("float32", longest)
    for prompt in answers.prompts:
        assert len(prompt) < longest
        pattern = prompt[: len(prompt) // 5]
        assert prompt == pattern * 5, "a draft is found only in a text that repeats itself"


@pytest.mark.parametrize(("dtype", "shift"), [("float32", 0.002), ("bfloat16", -9999.0), ("auto", 0.5)])
async def test_one_wrong_logprob_in_an_answer_is_refused_with_its_size(dtype: str, shift: float) -> None:
    with pytest.raises(EngineError, match=r"16 of 1024 differ by more than .* by up to") as caught:
        await Answers(shift).check(dtype, 4096)
    assert not caught.value.retryable
    assert f"{abs(shift):.3g}" in str(caught.value)


async def test_kernels_of_16_bits_may_differ() -> None:
    await Answers(0.1).check("bfloat16", 4096)


async def test_too_few_of_the_likeliest_tokens_are_refused_with_their_number() -> None:
    with pytest.raises(EngineError, match=r"\d+ of 1024 were the likeliest, \d+ ± \d+ are expected"):
        await Answers(share=0.15).check("float32", 4096)


@pytest.mark.parametrize(
    ("flags", "method"),
    [
        ({}, ""),
        ({"quantization": "fp8", "speculative_config": None}, ""),
        ({"speculative_config": {"method": "ngram"}}, "ngram"),
        ({"speculative-config.method": "suffix"}, "suffix"),
        ({"speculative_algorithm": "NGRAM"}, "ngram"),
        ({"speculative_config": {"model": "small"}}, "a draft model"),
        ({"speculative_draft_model_path": "small"}, "a draft model"),
    ],
)
def test_the_method_is_read_in_every_spelling(flags: dict[str, Any], method: str) -> None:
    assert draft_method(flags) == method
