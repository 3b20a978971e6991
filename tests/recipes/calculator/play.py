"""Plays the calculator task offline: how often a model calls the tool, and what it earns.

No server, no sandbox: the tool is answered by evaluating `print(round(EXPRESSION,n))`, the only code the model knows.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import torch
from reward import compute_score
from traces import PYTHON_TOOL

from penstock.datasets import BadExpression, evaluate

CALL = re.compile(r'<tool_call>\n(\{"name": "python".*\})\n</tool_call>$')
CODE = re.compile(r"print\(round\((.*),(\d)\)\)")
TURN_TOKENS = 40


@dataclass(slots=True)
class ProbeEpisode:
    """One played problem."""

    prompt_ids: list[int]
    response_ids: list[int]
    called: bool = False
    text: str = ""
    reward: float = 0.0


def play(model: Any, tokenizer: Any, rows: list[dict[str, Any]], temperature: float) -> list[ProbeEpisode]:
    """Two turns per row: the model's call or answer, and after a call its answer; scored by the recipe's reward."""
    episodes = [first_prompt(tokenizer, row) for row in rows]
    write_turn(model, tokenizer, episodes, temperature)
    callers = [episode for episode in episodes if answer_call(tokenizer, episode)]
    write_turn(model, tokenizer, callers, temperature)
    for row, episode in zip(rows, episodes, strict=True):
        truth = row["reward_model"]["ground_truth"]
        episode.reward = compute_score(row["data_source"], episode.text, truth, {"final_text": episode.text})
    return episodes


def first_prompt(tokenizer: Any, row: dict[str, Any]) -> ProbeEpisode:
    text = tokenizer.apply_chat_template(row["prompt"], tools=[PYTHON_TOOL], add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ProbeEpisode(ids, [])


@torch.inference_mode()
def write_turn(model: Any, tokenizer: Any, episodes: list[ProbeEpisode], temperature: float) -> None:
    """Sample one turn for each episode, in batches padded on the left."""
    for start in range(0, len(episodes), 128):
        batch = episodes[start : start + 128]
        contexts = [torch.tensor((e.prompt_ids + e.response_ids)[::-1]) for e in batch]
        ids = torch.nn.utils.rnn.pad_sequence(contexts, True, -1).flip(1)
        mask = (ids >= 0).long()
        sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        out = model.generate(
            input_ids=ids.clamp(min=0), attention_mask=mask, max_new_tokens=TURN_TOKENS, top_k=0, **sampling
        )
        for episode, row in zip(batch, out[:, ids.shape[1] :].tolist(), strict=True):
            end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
            episode.response_ids += row[:end]
            episode.text = tokenizer.decode(row[:end], skip_special_tokens=True)


def answer_call(tokenizer: Any, episode: ProbeEpisode) -> bool:
    """Append the tool's answer where the turn was a call; False if it was not."""
    episode.called = "<tool_call>" in episode.text
    call = CALL.fullmatch(episode.text)
    code = CODE.fullmatch(parse_code(call.group(1))) if call else None
    if code is None:
        return False
    try:
        observation = str(round(evaluate(code.group(1)), int(code.group(2))))
    except BadExpression as error:
        observation = str(error)
    body = f"<|im_start|>user\n<tool_response>\n{observation}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    episode.response_ids += tokenizer("\n" + body, add_special_tokens=False)["input_ids"]
    return True


def parse_code(arguments: str) -> str:
    try:
        return str(json.loads(arguments)["arguments"]["code"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return ""


def summary(episodes: list[ProbeEpisode]) -> dict[str, float]:
    called = [episode for episode in episodes if episode.called]
    direct = [episode for episode in episodes if not episode.called]
    return {
        "calls": mean([episode.called for episode in episodes]),
        "reward": mean([episode.reward for episode in episodes]),
        "reward_if_called": mean([episode.reward for episode in called]),
        "reward_if_direct": mean([episode.reward for episode in direct]),
    }


def mean(values: list[Any]) -> float:
    return round(sum(values) / len(values), 4) if values else 0.0
