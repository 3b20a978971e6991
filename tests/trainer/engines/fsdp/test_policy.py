"""Logprobs: packed equals one by one, chunks equal the whole, temperature divides, models are probed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file
from tests.tiny_model import save_tiny_model
from trainer_support import make_segment
from transformers import AutoModelForCausalLM

from penstock.trainer import BadJob, ModelLimits, make_row, pack_rows
from penstock.trainer.batch import Row, number_tokens
from penstock.trainer.engines.fsdp import load_policy
from penstock.trainer.engines.fsdp.attention import UnsupportedAttention, packed_attention
from penstock.trainer.logprobs import Head
from penstock.trainer.packing import join_rows

pytestmark = pytest.mark.torch


def rows(count: int) -> list[Row]:
    rng = np.random.default_rng(1)
    limits = ModelLimits(context=256, vocab=64)
    made = [make_segment(rng, 0, int(rng.integers(1, 40)), int(rng.integers(9, 60))) for _ in range(count)]
    return [make_row(n, s, "", step=0, bound=0, model=limits) for n, s in enumerate(made)]


def plain_logprobs(model: str, row: Row, temperature: float = 1.0) -> torch.Tensor:
    """The reference: transformers' own forward of one row, all logits; sdpa leaves out Gemma 2's caps."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits = loaded(input_ids=torch.from_numpy(row.ids)[None]).logits[0] / temperature
    logprobs = logits.log_softmax(-1)
    targets = torch.from_numpy(row.targets)
    return logprobs[targets - 1, torch.from_numpy(row.ids)[targets]]


CAPPED = {"initializer_range": 0.6, "sliding_window": 16, "attn_logit_softcapping": 1.0}
SINKS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}


@pytest.mark.parametrize(
    ("kind", "changes", "temperature"),
    [
        ("Qwen3", {"initializer_range": 0.02}, 1.0),
        ("Qwen3", {"initializer_range": 0.02}, 0.7),
        ("Gemma2", {"intermediate_size": 48, "sliding_window": 16, "final_logit_softcapping": 2.0}, 1.0),
        ("Cohere", {"logit_scale": 0.25, "num_key_value_heads": 4}, 1.0),
        ("Granite", {"logits_scaling": 3.0}, 1.0),
        ("Gemma2", CAPPED, 1.0),
        ("VaultGemma", CAPPED, 1.0),
        ("GptOss", SINKS, 1.0),
    ],
)
def test_packed_equals_one_by_one_whatever_caps_or_scales(
    tmp_path: Path, kind: str, changes: dict[str, Any], temperature: float
) -> None:
    model = save_tiny_model(tmp_path, kind, **{"initializer_range": 0.3, **changes})
    assert_exact(model, temperature, in_tiles=True)


def test_a_head_that_is_not_understood_is_called_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny_model(tmp_path, "Granite", logits_scaling=3.0)
    monkeypatch.setattr("penstock.trainer.engines.fsdp.traits._head_settings", lambda model: Head())
    assert_exact(model, in_tiles=False)


def assert_exact(model: str, temperature: float = 1.0, *, in_tiles: bool) -> None:
    loaded, given = load_policy(model, temperature), rows(6)
    assert (loaded.head is not None) == in_tiles
    assert loaded.model.config._attn_implementation == "penstock_packed"
    with torch.no_grad():
        packed = loaded(join_rows(given)).logprobs
    alone = torch.cat([plain_logprobs(model, row, temperature) for row in given])
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)


def same_prompt(count: int) -> list[Row]:
    rng = np.random.default_rng(2)
    limits = ModelLimits(context=256, vocab=64)
    first = make_segment(rng, 0, 40, 30)
    made = [replace(make_segment(rng, 0, 40, 9 + 7 * n), prompt_ids=first.prompt_ids) for n in range(count)]
    return [make_row(n, s, "", step=0, bound=0, model=limits) for n, s in enumerate(made)]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Qwen3", {}),
        ("Gemma2", {"sliding_window": 16, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0}),
        ("GptOss", SINKS),
    ],
)
def test_shared_prompts_change_neither_logprobs_nor_gradients(
    tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    loaded = load_policy(save_tiny_model(tmp_path, kind, **changes), 1.0)
    given = number_tokens([*same_prompt(5), *rows(2)])
    (shared,) = pack_rows(given, 10_000, share=True)
    assert not loaded.unshared_because
    assert len(shared.ids) == sum(len(row.ids) for row in given) - 4 * 40
    results = []
    for pack in (shared, join_rows(given)):
        loaded.zero_grad()
        by_token = loaded(pack).logprobs
        by_token.square().sum().backward()
        results.append((by_token.detach()[pack.token.argsort()], [p.grad.clone() for p in loaded.parameters()]))
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-5, rtol=0)
    for mine, expected in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-3, rtol=1e-4)


def logprobs_and_gradient(loaded: Any, pack: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """[N] and, of their sum, [V, D]: that of the embedding."""
    loaded.zero_grad()
    found = loaded(pack).logprobs
    found.sum().backward()
    return found.detach(), loaded.model.model.embed_tokens.weight.grad.clone()


HEAD, ATTENTION = "penstock.trainer.logprobs", "penstock.trainer.engines.fsdp.attention"


@pytest.mark.parametrize(
    ("kind", "changes", "tiles"),
    [
        ("Qwen3", {}, {f"{HEAD}.VOCAB_TILE": (4096, 11), f"{HEAD}.CPU_TILE_ELEMENTS": (1 << 20, 77)}),
        ("Gemma2", CAPPED, {f"{ATTENTION}.QUERY_TILE": (512, 7)}),
        ("GptOss", SINKS, {f"{ATTENTION}.QUERY_TILE": (512, 7)}),
    ],
    ids=["head", "capped attention", "attention with sinks"],
)
def test_tiles_change_neither_logprobs_nor_gradients(
    kind: str,
    changes: dict[str, Any],
    tiles: dict[str, tuple[int, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded, pack, results = load_policy(save_tiny_model(tmp_path, kind, **changes), 1.0), join_rows(rows(4)), []
    for size in range(2):
        for name, sizes in tiles.items():
            monkeypatch.setattr(name, sizes[size])
        results.append(logprobs_and_gradient(loaded, pack))
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-5 if kind == "Qwen3" else 1e-4, rtol=0)
    torch.testing.assert_close(results[0][1], results[1][1], atol=1e-5 if kind == "Qwen3" else 1e-3, rtol=1e-4)


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, value in (("layers.1.mlp.up_proj", "nan"), ("layers.0.self_attn.k_proj", "inf")):
        tensors[f"model.{name}.weight"][0, 0] = float(value)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        BadJob, match=r"weights hold NaN.*first in model\.layers\.0\.self_attn\.k_proj\.weight and 1 more"
    ):
        load_policy(model, 1.0)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"indices": torch.zeros(1)}, "indices"),
        ({"is_causal": False}, "is_causal"),
        ({"attention_mask": torch.ones(1, 1, 5, 5)}, "attention_mask"),
    ],
)
def test_unknown_attention_arguments_are_refused(given: dict[str, Any], named: str) -> None:
    heads = torch.zeros(1, 4, 5, 8)
    arguments = {"attention_mask": None, "position_ids": None, "use_cache": False, **given}
    bounds = torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(UnsupportedAttention, match=named):
        packed_attention(torch.nn.Identity(), heads, heads, heads, cu_seq_lens_q=bounds, **arguments)


def test_a_model_of_an_unknown_kind_is_a_bad_job(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(BadJob, match="no_such_model"):
        load_policy(str(tmp_path), 1.0)
