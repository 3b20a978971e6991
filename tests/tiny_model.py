"""Tiny random models for tests, saved as folders that transformers, vLLM and SGLang load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}


def save_tiny_model(folder: Path, kind: str = "Qwen3", *, tokenizer: bool = False, **changes: Any) -> str:
    """`folder`, holding a float32 model of `kind`; always the same weights. `changes` are of its configuration."""
    import torch
    import transformers

    torch.manual_seed(0)
    config_kind = getattr(transformers, f"{kind}TextConfig", None) or getattr(transformers, f"{kind}Config")
    config = config_kind(**{**SHAPE, **changes})
    getattr(transformers, f"{kind}ForCausalLM")(config).float().save_pretrained(folder)
    if tokenizer:
        save_tokenizer(folder, config.vocab_size)
    return str(folder)


def save_poisoned_model(folder: Path) -> str:
    """A model whose embedding of token 7 is NaN; its head is another tensor, so only rows with that token suffer."""
    from safetensors.torch import load_file, save_file

    model = save_tiny_model(folder, tokenizer=True, tie_word_embeddings=False)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][7] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return model


def save_tokenizer(folder: Path, words: int) -> None:
    """Token i is the word ``t{i}``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(words)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(folder)
