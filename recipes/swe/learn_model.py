"""The model that learn.yaml begins with: Qwen3 of a million random weights, and a tokenizer made of its tasks.

    python -m penstock.recipes.swe.learn_model --out data/swe-learn/base

It has to be shown how to repair before it can learn anything (`penstock sft`). The system prompt with its tools, and
what stands around the names, operators and numbers of a call or its result, are single tokens: an episode is two to
three hundred tokens long. Same seed, same model.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from penstock.agent_loops import load_object
from penstock.recipes.swe.learn_data import (
    BOX_FOLDER,
    CHECK_COMMAND,
    FAILED,
    PASSES,
    BrokenPackage,
    Message,
    bugs_of,
    conversation,
)
from penstock.recipes.swe.learn_package import check
from penstock.testing import FakeSandbox
from penstock.tools import ToolConfig, make_tools

HERE = Path(__file__).parent
TEMPLATE = HERE.parent / "calculator" / "chat_template.jinja"
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
PIECES = Regex(r"[A-Za-z_]+|\d+|[^A-Za-z_\d]+")
"""A name, a number, an operator with the spaces around it: each may become one token."""
VOCABULARY = 640
CONTEXT = 1024


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    print(f"{options.out}: {sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of the conversations; any other text is spelled in smaller pieces."""
    texts = list(rendered())
    # Text around the names in a call.
    frames = [
        '\n{"name": "shell", "arguments": {"command": "',
        "cat ",
        CHECK_COMMAND,
        '\n{"name": "editor", "arguments": {"command": "replace", "path": "',
        '.py", "old_text": "',
        '", "text": "',
        '"}}\n',
        '.py"}}\n',
        '\n{"name": "submit", "arguments": {}}\n',
    ]
    # Text around the names and numbers in a result, and in the request.
    results = [
        *(f"{BOX_FOLDER}/", ".py now reads:\n     1\tdef ", "):\n     2\t    return ", "def ", "):\n    return "),
        *("Make check.py pass. It says: ", ") is ", ", not ", FAILED, PASSES),
    ]
    whole = [system_block(texts[0]), *frames, *results]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(PIECES, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(cut(texts, [*CONTROL, *MARKS, *whole]), trainer)
    core.add_tokens([AddedToken(text, normalized=False) for text in [*MARKS, *whole]])
    return wrapped(core)


def wrapped(core: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        **{"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        additional_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE.read_text(encoding="utf-8").strip(),
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def rendered() -> Iterator[str]:
    """Conversations with each of the bugs in each place, as the chat template writes them."""
    writer, tools = wrapped(Tokenizer(models.BPE())), make_tools([ToolConfig(name="swe")], FakeSandbox(), load_beside)
    schemas = [tool.schema for tool in tools.values()]
    functions = list(check.EXAMPLES)
    for one, next_one in zip(functions, [*functions[1:], functions[0]], strict=True):
        for bugs in zip(bugs_of(one), bugs_of(next_one), strict=True):
            messages: Sequence[Message] = conversation(BrokenPackage(bugs), len(bugs))
            yield str(writer.apply_chat_template(messages, tools=schemas, tokenize=False))


def load_beside(spec: str) -> object:
    return load_object(spec, HERE)


def system_block(text: str) -> str:
    """Returns the text between the first two control tokens."""
    return text.removeprefix("<|im_start|>").partition("<|im_end|>")[0]


def cut(texts: Sequence[str], at: Sequence[str]) -> Iterator[str]:
    """The parts of the texts between tokens that are there whole."""
    marks = re.compile("|".join(re.escape(mark) for mark in sorted(at, key=len, reverse=True)))
    for text in texts:
        yield from filter(None, marks.split(text))


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.08,  # at 0.02, made for wide models, one this narrow learns to copy several times later
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
