"""Make the calculator recipe's base model: a tiny Qwen3 that could use a calculator and mostly does not.

    python -m penstock.recipes.calculator.make_base_model --out recipes/calculator/model

Tokenizer, weights and traces come from the seed alone. Supervised on `traces.py` in two phases: first most traces
call the tool, so that copying becomes sharp; then they are mixed as the base model shall behave.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from functools import cache
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from penstock.recipes.calculator.traces import PYTHON_TOOL, Trace, trace

VOCABULARY = 600
CONTEXT = 1024
IGNORED = -100

CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOOL_TOKENS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
PIECES = Regex(r"\d|[-+*/()]|\.(?=\d)|(?:(?!\.\d)[^\d+*/()\-])*[A-Za-z]\(|(?:(?!\.\d)[^\d+*/()\-])+")
"""Digits and signs stand alone, so that copying is token by token; all other text may become long tokens."""
Row = tuple[torch.Tensor, torch.Tensor]
"""ids [L] and labels [L], IGNORED where the model does not write."""


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tokenizer = make_tokenizer(Random(options.seed))
    model = make_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    fit(model, tokenizer, options)
    save(model, tokenizer, options.out)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=64, help="traces per step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def make_tokenizer(rng: Random) -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on rendered traces: the constant preamble compresses to a few tokens."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(PIECES, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TOOL_TOKENS),
        min_frequency=1,
        special_tokens=CONTROL_TOKENS,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    core.train_from_iterator(corpus(rng), trainer)
    core.add_tokens([AddedToken(text, normalized=False) for text in TOOL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        **{"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        additional_special_tokens=["<|im_start|>"],
        chat_template=template_text(),
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def corpus(rng: Random) -> list[str]:
    """The text between control tokens of rendered traces."""
    texts = [preamble_text()] * 400
    for _ in range(400):
        drawn = trace(rng, call_share=0.5)
        texts += [drawn.question, drawn.call or drawn.answer]
        texts += ["system\n", "user\n", "assistant\n", "user", "\n"]
    marks = re.compile("|".join(re.escape(text) for text in CONTROL_TOKENS + TOOL_TOKENS))
    return [piece for text in texts for piece in marks.split(text) if piece]


def template_text() -> str:
    return Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8").strip()


@cache
def preamble_text() -> str:
    """The system block with the tool, as the chat template renders it."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    text = environment.from_string(template_text()).render(
        messages=[{"role": "user", "content": ""}], tools=[PYTHON_TOOL]
    )
    return text.partition("<|im_start|>user")[0]


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
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def fit(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, options: argparse.Namespace) -> None:
    """Next-token loss on what the model has to write; cosine schedule."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, options.steps))
    rng, started = Random(options.seed + 1), time.monotonic()
    for step in range(options.steps):
        call_share = 0.75 if step < 0.8 * options.steps else 0.3  # at last as the base model shall behave
        rows = make_rows(tokenizer, [trace(rng, call_share) for _ in range(options.batch)], rng)
        optimizer.zero_grad(set_to_none=True)
        loss = backward(model, rows, tokenizer.pad_token_id)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == options.steps - 1:
            print(f"step {step:5d}  loss {loss:.4f}  {time.monotonic() - started:6.0f} s", flush=True)


def learning_rate(step: int, steps: int) -> float:
    """Warm-up over 50 steps, then half a cosine down to a fiftieth."""
    return min((step + 1) / 50, 0.02 + 0.49 * (1 + math.cos(math.pi * step / steps)))


def make_rows(tokenizer: PreTrainedTokenizerFast, traces: list[Trace], rng: Random) -> list[Row]:
    """One row per trace, shortest first; all of a batch carry the same system block."""
    preamble = preamble_pieces(rng)
    rows = []
    for drawn in traces:
        pieces = spans(tokenizer, preamble, drawn)
        ids = [token for span, _ in pieces for token in span]
        labels = [token if written else IGNORED for span, written in pieces for token in span]
        rows.append((torch.tensor(ids), torch.tensor(labels)))
    return sorted(rows, key=lambda row: len(row[0]))


def backward(model: Qwen3ForCausalLM, rows: list[Row], pad_id: int) -> float:
    """Gradients of the mean loss per written token, in quarters of like length so that little is padding."""
    written = sum(int((labels != IGNORED).sum()) for _, labels in rows)
    total = 0.0
    for part in batched(rows, math.ceil(len(rows) / 4)):
        ids = pad_sequence([ids for ids, _ in part], batch_first=True, padding_value=pad_id)
        labels = pad_sequence([labels for _, labels in part], batch_first=True, padding_value=IGNORED)
        loss = next_token_loss(model, ids, labels) / written
        loss.backward()
        total += loss.item()
    return total


def batched(rows: list[Row], size: int) -> list[list[Row]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def preamble_pieces(rng: Random) -> list[str]:
    """The system block, sometimes cut at random: a reworded tool description must not throw the model off."""
    text = preamble_text()
    if rng.random() < 0.9:
        return [text]
    cuts = sorted(rng.sample(range(len(text)), rng.randint(1, 2)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def spans(tokenizer: PreTrainedTokenizerFast, preamble: list[str], drawn: Trace) -> list[tuple[list[int], bool]]:
    """The trace in pieces of (ids, written by the model), cut where an agent loop cuts it."""
    texts = [*((piece, False) for piece in preamble), (question_text(drawn.question), False)]
    if drawn.call is not None:
        texts += [(drawn.call + "<|im_end|>", True), (observation_text(drawn.observation), False)]
    texts.append((drawn.answer + "<|im_end|>", True))
    encoded = tokenizer([text for text, _ in texts], add_special_tokens=False)["input_ids"]
    return [(span, written) for span, (_, written) in zip(encoded, texts, strict=True)]


def question_text(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def observation_text(observation: str) -> str:
    """Returns the text after the model's call: the tool's answer and the next generation prompt."""
    body = f"<tool_response>\n{observation}\n</tool_response>"
    return f"\n<|im_start|>user\n{body}<|im_end|>\n<|im_start|>assistant\n"


def next_token_loss(model: Qwen3ForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum over the written tokens; right padding needs no mask, because attention is causal."""
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    written = labels[:, 1:] != IGNORED  # [B, L-1]
    return F.cross_entropy(model.lm_head(hidden[written]), labels[:, 1:][written], reduction="sum")


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **ends)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("interrupted: the model is not finished, the same command begins again") from None
