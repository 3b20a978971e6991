"""A small model for a laptop that knows nothing yet: Qwen3 of 2 million random weights, and a tokenizer of the corpus.

    python -m penstock.recipes.search_r1.make_model --out data/search-r1/base
    python -m penstock.recipes.search_r1.make_model --out data/two-hops/base --whole-names  # for learn.yaml

With `--whole-names` each name of corpus/facts.jsonl is one token wherever it stands, and so is what prompts say of the
tool: what is left to learn is which name to write, not how it is spelled, and contexts are short.

It has to be shown how to search before it can learn anything (`penstock sft`). Same seed, same model.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from penstock.tools import SearchTool

HERE = Path(__file__).parent
TEMPLATE = HERE.parent / "calculator" / "chat_template.jinja"
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<answer>", "</answer>"]
VOCABULARY = 4096
CONTEXT = 2048
SMALL = {"hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 4, "head_dim": 64}
SCHEMA = {
    "type": "function",
    "function": {"name": SearchTool.name, "description": SearchTool.description, "parameters": SearchTool.parameters},
}
CALL = ['\n{"name": "search", "arguments": {"query": "', '"}}\n']
"""The template's text between a call's marks, around the query."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--whole-names", action="store_true", help="names are single tokens, the model is smaller")
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    tokenizer = make_tokenizer()
    if options.whole_names:
        add_whole_names(tokenizer)
    # Weights as wide as 1/sqrt(hidden_size): at the usual 0.02 copying a token takes thousands of steps to learn.
    smaller = {
        **{"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "head_dim": 32},
        "initializer_range": 0.08,
    }
    model = make_model(tokenizer, smaller if options.whole_names else SMALL)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    print(f"{options.out}: {sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of the corpus, the questions and what prompts say of the tool."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(MARKS),
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts(), trainer)
    core.add_tokens([AddedToken(text, normalized=False) for text in MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        **{"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        additional_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE.read_text(encoding="utf-8").strip(),
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def texts() -> Iterator[str]:
    constant = [
        json.dumps(SCHEMA),
        *re.findall(r"'([^']{8,})'", TEMPLATE.read_text()),
    ]
    for name in ("corpus.jsonl", "questions.jsonl"):
        for line in (HERE / "corpus" / name).read_text(encoding="utf-8").splitlines():
            yield from words(json.loads(line))
            yield from constant


def words(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
        yield f" {value}"
    else:
        for part in value.values() if isinstance(value, dict) else value:
            yield from words(part)


def add_whole_names(tokenizer: PreTrainedTokenizerFast) -> None:
    """Names, and the texts that all prompts and calls share, as one token each."""
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": ""}], tools=[SCHEMA], tokenize=False)
    of_the_tool = prompt.partition("<|im_start|>system\n")[2].partition("<|im_end|>")[0]
    lines = (HERE / "corpus" / "facts.jsonl").read_text(encoding="utf-8").splitlines()
    facts = [json.loads(line) for line in lines]
    names = {fact[key] for fact in facts for key in ("article", "value", "mention") if key in fact}
    texts = [AddedToken(text, normalized=False) for text in (of_the_tool, *CALL)]
    tokenizer.add_tokens([*texts, *(AddedToken(name, normalized=False, single_word=True) for name in sorted(names))])


def make_model(tokenizer: PreTrainedTokenizerFast, shape: Mapping[str, Any]) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        **shape,
        vocab_size=len(tokenizer),
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **ends)
    return model


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("interrupted: the model is not finished, the same command begins again") from None
