"""The hf engine's attention: scores that are capped agree with the trainer, unknown arguments are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.rollout_server.conftest import small_config
from tests.tiny_model import save_tiny_model
from transformers import AutoModelForCausalLM, DynamicCache

from penstock.rollout_server import Sampling
from penstock.rollout_server.engines.hf.attention import NAME, UnsupportedArguments, attend_by_request
from penstock.rollout_server.engines.hf.batch import Batcher
from penstock.trainer import ModelLimits, Pack, make_row, pack_rows
from penstock.trainer.engines.fsdp import load_policy
from penstock.transfer_queue import Segment

pytestmark = [pytest.mark.torch]
CAPPED = {"initializer_range": 0.6, "sliding_window": 16, "attn_logit_softcapping": 1.0}
PROMPTS = {"long": [(7 * i + 3) % 64 for i in range(50)], "short": [5, 6, 7]}


async def sample(model: Any, prompts: dict[str, list[int]], count: int) -> dict[str, tuple[list[int], list[float]]]:
    """The answers to all of them, decoded together."""
    batcher = Batcher(model, small_config(), 0, lambda: None)
    answers: dict[str, tuple[list[int], list[float]]] = {name: ([], []) for name in prompts}
    open_names = set(prompts)
    try:
        for name, prompt in prompts.items():
            batcher.add(name, prompt, Sampling(max_new_tokens=count))
        async with asyncio.timeout(60):
            while open_names:
                assert batcher.fatal_error is None
                for name, chunk in batcher.collect():
                    assert not isinstance(chunk, str), chunk
                    answers[name][0].extend(chunk.token_ids)
                    answers[name][1].extend(chunk.logprobs)
                    if chunk.finish_reason:
                        open_names.remove(name)
                await asyncio.sleep(0.005)
    finally:
        batcher.stop()
    return answers


def pack_of(prompt: Sequence[int], sampled: Sequence[int], vocab: int = 64) -> Pack:
    """One row of a trainer's batch."""
    segment = Segment(
        prompt_ids=np.array(prompt, dtype=np.int32),
        response_ids=np.array(sampled, dtype=np.int32),
        response_mask=np.ones(len(sampled), dtype=np.uint8),
        response_logprobs=np.zeros(len(sampled), dtype=np.float32),
        version_spans=np.array([[0, 0, len(sampled)]], dtype=np.int32),
        turn_starts=np.array([0], dtype=np.int32),
    )
    row = make_row(0, segment, "", step=0, bound=0, model=ModelLimits(context=256, vocab=vocab))
    (pack,) = pack_rows([row], 256)
    return pack


def trainer_logprobs(model: str, prompt: list[int], sampled: list[int]) -> list[float]:
    with torch.no_grad():
        return load_policy(model, 1.0)(pack_of(prompt, sampled)).logprobs.tolist()


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("Gemma2", {}), ("Gemma2", {"layer_types": ["full_attention", "full_attention"]}), ("VaultGemma", {})],
)
async def test_capped_scores_give_the_trainers_logprobs(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    path = save_tiny_model(tmp_path, kind, **CAPPED, **changes)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=NAME)
    answers = await sample(model, PROMPTS, 30)
    for name, prompt in PROMPTS.items():
        ids, logprobs = answers[name]
        assert logprobs == pytest.approx(trainer_logprobs(path, prompt, ids), abs=5e-5)


def test_capped_scores_are_exact_without_a_paged_cache(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "Gemma2", **CAPPED)
    ids = torch.tensor([PROMPTS["long"]])
    logits = []
    for attention in ("eager", NAME):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=attention)
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            first = model(ids[:, :40], past_key_values=cache, use_cache=True).logits
            rest = [model(ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits for i in range(40, 50)]
        logits.append(torch.cat([first, *rest], dim=1))
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("given", [{"s_aux": torch.zeros(4)}, {"indices": torch.zeros(1)}])
def test_unknown_attention_arguments_are_refused(given: dict[str, Any]) -> None:
    heads = torch.zeros(1, 4, 5, 8)
    with pytest.raises(UnsupportedArguments, match=next(iter(given))):
        attend_by_request(torch.nn.Identity(), heads, heads, heads, None, position_ids=None, use_cache=False, **given)
