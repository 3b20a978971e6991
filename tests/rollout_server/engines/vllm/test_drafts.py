"""The real vLLM is refused with drafts, or its answers are distributed as the policy's and have its logprobs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.rollout_server.conformance.subject import engine_config
from tests.rollout_server.conftest import ask, skip_without, whole

from penstock.rollout_server import BadRequest, EngineError, Generation, make_engine
from penstock.rollout_server.engines.vllm.engine import VLLMEngine

pytestmark = [pytest.mark.vllm, pytest.mark.deep, pytest.mark.timeout(1200)]
MODEL = "recipes/calculator/model"
DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
PROMPT = [(37 * place) % 500 for place in range(12)] * 5
ANSWERS, LENGTH = 200, 48
RANKS = ((0, 1), (1, 2), (2, 5), (5, 515))
"""Tokens are counted by their place among the likeliest."""
FAR = 4.5
"""Standard deviations."""


async def test_drafts_are_refused_unless_answers_behind_them_are_the_policys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's build for CPUs draws too few of the likeliest tokens."""
    await skip_without("vllm")
    refusal = ""
    try:
        await (checked := engine_with_drafts(tmp_path / "checked")).start()
        await checked.stop()
    except EngineError as error:
        refusal = str(error)
    monkeypatch.setattr(VLLMEngine, "_check_drafts", no_check)
    engine = engine_with_drafts(tmp_path / "unchecked")
    await engine.start()
    try:
        with pytest.raises(BadRequest, match="temperature 1"):
            await whole(engine, ask(PROMPT, 4, temperature=0.7))
        answers = await asyncio.gather(*(whole(engine, ask(PROMPT, LENGTH)) for _ in range(ANSWERS)))
    finally:
        await engine.stop()
    logprobs = policys_logprobs(answers)
    ids = torch.tensor([answer.token_ids for answer in answers])
    sampled = logprobs.gather(2, ids[..., None])[..., 0]
    assert (sampled - torch.tensor([answer.logprobs for answer in answers])).abs().max() < 1e-4
    far = [z for z in scores(logprobs, ids) if abs(z) > FAR]
    assert ("samples other tokens than the policy" in refusal) == bool(far), (refusal, far)


def engine_with_drafts(logs: Path) -> Any:
    logs.mkdir()
    settings = {"max_model_len": 256, "vllm_args": {"speculative_config": DRAFTS}}
    return make_engine(engine_config("vllm", **settings), MODEL, logs, 0)


async def no_check(engine: VLLMEngine, vocabulary: int) -> None:
    """In place of the check at the start."""


def policys_logprobs(answers: list[Generation]) -> Any:
    """[answers, tokens, vocabulary] by plain forward passes."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    rows = torch.tensor([[*PROMPT, *answer.token_ids] for answer in answers])
    with torch.no_grad():
        return model(rows).logits[:, len(PROMPT) - 1 : -1].log_softmax(-1)


def scores(logprobs: Any, ids: Any) -> list[float]:
    """Standard scores of how often tokens of each range of ranks were sampled."""
    order = logprobs.argsort(-1, descending=True)
    rank = (order == ids[..., None]).int().argmax(-1)
    likely = logprobs.gather(2, order).exp()
    standard_scores = []
    for first, last in RANKS:
        expected = likely[..., first:last].sum(-1).double()
        seen = ((rank >= first) & (rank < last)).double()
        spread = (expected * (1 - expected)).sum().sqrt()
        standard_scores.append(float((seen - expected).sum() / spread))
    return standard_scores
