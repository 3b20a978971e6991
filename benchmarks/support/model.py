"""Random Qwen3 models of a few sizes, and a byte-level BPE tokenizer, made without a download."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Size:
    """Of a Qwen3 with tied embeddings; two query heads share a key head."""

    hidden: int
    layers: int
    heads: int
    head_dim: int
    vocab: int
    context: int = 2048


SIZES = {
    "tiny": Size(hidden=64, layers=2, heads=4, head_dim=32, vocab=512),
    "2m": Size(hidden=192, layers=4, heads=4, head_dim=32, vocab=2048),
    "9m": Size(hidden=256, layers=6, heads=8, head_dim=32, vocab=16000, context=8192),
    "56m": Size(hidden=512, layers=12, heads=8, head_dim=64, vocab=32000),
    "77m": Size(hidden=512, layers=24, heads=8, head_dim=64, vocab=4096),
    "100m": Size(hidden=640, layers=16, heads=10, head_dim=64, vocab=40000),
    "0.6b": Size(hidden=1024, layers=28, heads=16, head_dim=128, vocab=151936, context=8192),
}
"""By about their number of values."""


def save_model(size: Size, folder: Path, dtype: str) -> int:
    """Write the model where an engine finds it; returns its number of values."""
    model = make_model(size, dtype)
    model.save_pretrained(folder)
    return int(model.num_parameters())


def make_model(size: Size, dtype: str) -> Any:
    """A transformers model with weights of the usual deviation."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 2,
        head_dim=size.head_dim,
        max_position_embeddings=size.context,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        dtype=dtype,
    )
    return Qwen3ForCausalLM(config).to(getattr(torch, dtype))


MIXTURE: dict[str, Any] = {
    **{"num_experts": 32, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "hidden_size": 64},
    **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64},
    **{"max_position_embeddings": 256, "norm_topk_prob": True, "tie_word_embeddings": False},
}
"""Settings of a Qwen3-MoE that has nearly all its values in its experts."""


def save_mixture(folder: Path) -> str:
    """Write a float32 model of `MIXTURE`; returns the folder."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**MIXTURE)).float().save_pretrained(folder)
    return str(folder)


ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / "tests" / "agent_loops" / "templates" / "qwen2_5.jinja"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = 8_000


def trained_tokenizer() -> Any:
    """Of 8,000 tokens, in about a second."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_texts(), trainer)
    template = TEMPLATE.read_text()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=template)  # noqa: S106


def _texts() -> Iterator[str]:
    for folder in ("docs", "agent_loops", "tools"):
        for file in sorted([*(ROOT / folder).rglob("*.md"), *(ROOT / folder).rglob("*.py")]):
            yield file.read_text()
