"""`transformers.generate` as a process that answers a load with one batch: what the `hf` engine is compared with.

python -m benchmarks.support.generate_child

    {"do": "generate", "load": {…}, "model", "dtype", "threads"}    see `load.Took`; the first token comes with the last
"""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.support.child import answer_questions, own_stdout
from benchmarks.support.load import Load, Took, prompts


@functools.cache
def load_model(path: str, dtype: str, threads: int) -> Any:
    torch.set_num_threads(threads)
    return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()


def answer(question: dict[str, Any]) -> dict[str, Any]:
    model = load_model(question["model"], question["dtype"], question["threads"])
    load = Load(**question["load"])
    asked = [prompts(load, number) for number in range(load.concurrency)]
    began, cpu_began, sampled = time.perf_counter(), time.process_time(), 0
    for _ in range(load.waves):
        ids = torch.tensor([next(one) for one in asked])
        with torch.inference_mode():
            whole = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                min_new_tokens=load.answer_tokens,
                max_new_tokens=load.answer_tokens,
                pad_token_id=0,
            )
        sampled += whole.numel() - ids.numel()
    took = time.perf_counter() - began
    return Took(took, sampled, took, took, time.process_time() - cpu_began).json()


if __name__ == "__main__":
    answer_questions(own_stdout(), answer)
