"""Play the calculator task offline: how often does a model call the tool, and what does it earn?

    python recipes/calculator/probe_base_model.py --model recipes/calculator/model [--data gsm8k/test.parquet]

No server, no sandbox: the tool is answered by evaluating `print(round(EXPRESSION,n))`, the only code the model knows.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from reward import compute_score
from traces import PYTHON_TOOL
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.datasets import BadExpression, evaluate, problems

CALL = re.compile(r'<tool_call>\n(\{"name": "python".*\})\n</tool_call>$')
CODE = re.compile(r"print\(round\((.*),(\d)\)\)")
TURN_TOKENS = 40


@dataclass(slots=True)
class ProbeEpisode:
    """One played problem; `response_mask` is 1 where the model wrote."""

    expression: str
    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    called: bool = False
    right_call: bool = False
    text: str = ""
    reward: float = 0.0

    def extend(self, ids: list[int], written: bool) -> None:
        self.response_ids += ids
        self.response_mask += [int(written)] * len(ids)


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rows = read_rows(options)
    for temperature in (1.0, 0.0):
        episodes = play(model, tokenizer, rows, temperature)
        print(f"temperature {temperature}: {json.dumps(summary(episodes))}")
        for episode in [e for e in episodes if e.called and not e.reward][: options.show]:
            print(f"    {episode.expression}: {tokenizer.decode(episode.response_ids)!r}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, help="Parquet with verl's columns; default: generated problems")
    parser.add_argument("--count", type=int, default=512)
    parser.add_argument("--show", type=int, default=0, help="failed calls to print")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def read_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    if options.data is None:
        return problems(options.count, 0, options.seed + 1000)[0]
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = pq.read_table(options.data).to_pylist()
    return rows[: options.count]


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
    return ProbeEpisode(row["extra_info"]["expression"], ids, [], [])


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
            episode.extend(row[:end], written=True)
            episode.text = tokenizer.decode(row[:end], skip_special_tokens=True)


def answer_call(tokenizer: Any, episode: ProbeEpisode) -> bool:
    """Append the tool's answer where the turn was a call; False if it was not."""
    episode.called = "<tool_call>" in episode.text
    call = CALL.fullmatch(episode.text)
    code = CODE.fullmatch(parse_code(call.group(1))) if call else None
    if code is None:
        return False
    episode.right_call = code.group(1) == episode.expression
    try:
        observation = str(round(evaluate(code.group(1)), int(code.group(2))))
    except BadExpression as error:
        observation = str(error)
    body = f"<|im_start|>user\n<tool_response>\n{observation}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    episode.extend(tokenizer("\n" + body, add_special_tokens=False)["input_ids"], written=False)
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
        "episodes": len(episodes),
        "calls": mean([episode.called for episode in episodes]),
        "reward": mean([episode.reward for episode in episodes]),
        "reward_if_called": mean([episode.reward for episode in called]),
        "expression_copied": mean([episode.right_call for episode in called]),
        "reward_if_direct": mean([episode.reward for episode in direct]),
        "response_tokens": mean([len(episode.response_ids) for episode in episodes]),
    }


def mean(values: list[Any]) -> float:
    return round(sum(values) / len(values), 4) if values else 0.0


if __name__ == "__main__":
    main()
