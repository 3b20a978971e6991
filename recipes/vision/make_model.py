"""Make the recipe's base model: a tiny Qwen2.5-VL that sees what is in a picture, and mostly guesses its answer.

    python -m penstock.recipes.vision.make_model --out data/vision/model

A cold start of two parts. First it learns to see: right answers alone, until it names what is in pictures that it was
not shown. Then it learns to doubt: with the vision tower fixed, its answers become a guess among those that fit the
question, the right one a little more likely than each other. What reinforcement learning has to add is to rely on what
it sees. Tokenizer, weights and pictures come from the seed alone.
"""

from __future__ import annotations

import argparse
import io
import json
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from penstock.recipes.vision.pictures import QUESTIONS, SIDE, WORDS, picture

HERE = Path(__file__).parent
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = 512
CONTEXT = 4096
TOKEN_SIDE = 28
"""2 by 2 patches of 14 by 14 pixels are one token."""
ENOUGH, LEAST = 0.99, 0.95
"""Shares of unseen pictures answered rightly: learning to see ends with the one, and fails below the other."""


class Example(NamedTuple):
    """A picture as the model takes it."""

    kind: str
    answer: str
    pixels: Tensor
    """[patches, numbers] float16: in float32 all of them would be over 100 MB"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=800, help="of learning to see, at most")
    parser.add_argument("--doubt-steps", type=int, default=80, help="of learning to doubt")
    parser.add_argument("--sure", type=float, default=0.25, help="share of answers that are no guess")
    parser.add_argument("--batch", type=int, default=48, help="pictures per step")
    parser.add_argument("--pictures", type=int, default=1536)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tokenizer, processor = make_tokenizer(), make_processor()
    shown = examples(Random(f"shown/{options.seed}"), options.pictures, processor)
    unseen = examples(Random(f"unseen/{options.seed}"), 240, processor)
    pupil = Pupil(make_model(tokenizer), tokenizer)
    print(f"{sum(p.numel() for p in pupil.model.parameters()):,} parameters, {len(tokenizer)} tokens", flush=True)
    learn_to_see(pupil, shown, unseen, options)
    learn_to_doubt(pupil, shown, options)
    save(pupil.model, tokenizer, processor, options.out)
    best, sampled = pupil.examine(unseen)
    print(f"{options.out}: of unseen pictures {best:.0%} right by the likeliest answer, {sampled:.0%} by a sampled one")


# parts --------------------------------------------------------------------------------------------------------------
def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of questions and answers. Raises `ValueError` where an answer is not one token."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[*CONTROL, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([*QUESTIONS.values(), *WORDS, "user", "assistant", "system", "\n"] * 50, trainer)
    if torn := [word for word in WORDS if len(core.encode(word).ids) != 1]:
        raise ValueError(f"answers of several tokens: {', '.join(torn)}; VOCABULARY is too small")
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        **{"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        additional_special_tokens=["<|im_start|>"],
        chat_template=(HERE / "chat_template.jinja").read_text(encoding="utf-8").strip(),
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def make_processor() -> Qwen2VLImageProcessorPil:
    """4 to 16 tokens an image."""
    return Qwen2VLImageProcessorPil(size={"shortest_edge": 4 * TOKEN_SIDE**2, "longest_edge": 16 * TOKEN_SIDE**2})


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLForConditionalGeneration:
    token = tokenizer.convert_tokens_to_ids
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": CONTEXT,
            "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0},
            "tie_word_embeddings": True,
            "bos_token_id": None,
            **ends,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": 128,
            "patch_size": TOKEN_SIDE // 2,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [0],
        },
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=True,
        **ends,
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    for parameter in model.parameters():  # transformers' own 0.02 is meant for wide layers: narrow ones learn slowly
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    return model


def examples(dice: Random, count: int, processor: Any) -> list[Example]:
    drawn = [picture(dice) for _ in range(count)]
    images = [Image.open(io.BytesIO(one.png)).convert("RGB") for one in drawn]
    pixels = processor(images, return_tensors="pt")["pixel_values"].half().chunk(count)
    return [Example(one.kind, one.answer, seen) for one, seen in zip(drawn, pixels, strict=True)]


# lessons ------------------------------------------------------------------------------------------------------------
class Pupil:
    """The model, and what it thinks of pictures. B = pictures, V = tokens of the vocabulary."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model = model
        self.end: int = tokenizer.eos_token_id
        self.vocabulary = len(tokenizer)
        self.prompts = {kind: prompt_of(tokenizer, kind) for kind in QUESTIONS}
        self.tokens = {word: int(tokenizer.convert_tokens_to_ids(word)) for word in WORDS}
        self.grid = torch.tensor([[1, SIDE // TOKEN_SIDE * 2, SIDE // TOKEN_SIDE * 2]])
        longest = max(self.prompts.values(), key=len)
        ids = torch.tensor([[*longest, self.end]])
        places = (ids == model.config.image_token_id).int()
        self.positions, _ = model.model.get_rope_index(ids, mm_token_type_ids=places, image_grid_thw=self.grid)
        """[3, 1, T]: the image stands at one place in all prompts, so one layout fits them all."""

    def logits(self, batch: Sequence[Example], answers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """[B, V] of the answer, [B, V] of what follows each of `answers`. Rows are filled up on the right."""
        ids = torch.zeros(len(batch), self.positions.shape[2], dtype=torch.long)
        for line, (one, answer) in enumerate(zip(batch, answers, strict=True)):
            row = torch.tensor([*self.prompts[one.kind], answer])
            ids[line, : len(row)] = row
        logits = self.model(
            input_ids=ids,
            position_ids=self.positions.expand(-1, len(batch), -1),
            pixel_values=torch.cat([one.pixels for one in batch]).float(),
            image_grid_thw=self.grid.repeat(len(batch), 1),
            use_cache=False,
        ).logits
        lines, ends = torch.arange(len(batch)), torch.tensor([len(self.prompts[one.kind]) for one in batch])
        return logits[lines, ends - 1], logits[lines, ends]

    def loss(self, batch: Sequence[Example], sure: float) -> Tensor:
        """Cross entropy with answers of which the share `sure` is right and the others are drawn evenly.

        The average over all draws, not one of them: a few steps are enough, and nothing is learned by heart.
        """
        targets = torch.stack([self._target_logits(one, sure) for one in batch])
        drawn = torch.multinomial(targets, 1).flatten().tolist()
        answers, ends = self.logits(batch, drawn)
        return F.cross_entropy(answers, targets) + F.cross_entropy(ends, torch.full((len(batch),), self.end))

    def _target_logits(self, one: Example, sure: float) -> Tensor:
        """[V]"""
        target = torch.zeros(self.vocabulary)
        target[list(self.tokens.values())] = (1 - sure) / len(WORDS)
        target[self.tokens[one.answer]] += sure
        return target

    @torch.no_grad()
    def examine(self, batch: Sequence[Example]) -> tuple[float, float]:
        """(share whose likeliest answer is right, mean probability of the right one)"""
        right = torch.tensor([self.tokens[one.answer] for one in batch])
        answers, _ = self.logits(batch, right.tolist())
        sampled = answers.softmax(-1).gather(1, right[:, None])
        return float((answers.argmax(-1) == right).float().mean()), float(sampled.mean())


def learn_to_see(pupil: Pupil, shown: Sequence[Example], unseen: Sequence[Example], options: Any) -> None:
    """Raises `SystemExit` if it does not learn it."""
    dice, started, right = Random(options.seed), time.monotonic(), 0.0
    optimizer = torch.optim.AdamW(pupil.model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(1, options.steps + 1):
        loss = learn(pupil, optimizer, dice.sample(shown, options.batch), options.lr * min(1, step / 20), sure=1)
        if step % 25 == 0:
            right, _ = pupil.examine(unseen)
            print(f"step {step:4d}  loss {loss:.3f}  right {right:.2f}  {time.monotonic() - started:.0f} s", flush=True)
        if right >= ENOUGH:
            return
    if right < LEAST:
        raise SystemExit(f"{right:.0%} of unseen pictures right after {options.steps} steps: give more --steps")


def learn_to_doubt(pupil: Pupil, shown: Sequence[Example], options: Any) -> None:
    """The vision tower stays as it is: what it sees must not be lost with the confidence."""
    pupil.model.model.visual.requires_grad_(False)
    learning = [parameter for parameter in pupil.model.parameters() if parameter.requires_grad]
    optimizer, dice = torch.optim.AdamW(learning, betas=(0.9, 0.98), weight_decay=0.0), Random(options.seed)
    for step in range(options.doubt_steps):
        remaining = 1 - step / options.doubt_steps
        learn(pupil, optimizer, dice.sample(shown, options.batch), options.lr / 4 * remaining, options.sure)
    pupil.model.model.visual.requires_grad_(True)


def learn(pupil: Pupil, optimizer: Any, batch: Sequence[Example], lr: float, sure: float) -> float:
    """One step; returns its loss."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad(set_to_none=True)
    loss = pupil.loss(batch, sure)
    loss.backward()
    torch.nn.utils.clip_grad_norm_([one for group in optimizer.param_groups for one in group["params"]], 1.0)
    optimizer.step()
    return float(loss.detach())


def prompt_of(tokenizer: Any, kind: str) -> list[int]:
    """Ids of the conversation up to the answer, a placeholder for each token of the image."""
    content = [{"type": "image"}, {"type": "text", "text": QUESTIONS[kind]}]
    messages = [{"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    places = "<|image_pad|>" * (SIDE // TOKEN_SIDE) ** 2
    ids: list[int] = tokenizer.encode(text.replace("<|image_pad|>", places), add_special_tokens=False)
    return ids


def save(model: Any, tokenizer: Any, processor: Any, out: Path) -> None:
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **ends)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    settings = {**processor.to_dict(), "processor_class": "Qwen2_5_VLProcessor"}
    (out / "preprocessor_config.json").write_text(json.dumps(settings, indent=1))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("interrupted: the model is not finished, the same command begins again") from None
