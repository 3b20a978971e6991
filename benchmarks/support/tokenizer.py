"""A tokenizer of realistic make without a download: byte-level BPE over this project's own text, Qwen2.5's template."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
