"""TRL's GRPOTrainer learns a recipe's task, with its `tools=` if that has one: a program of `penstock bench compare`.

    python -m benchmarks.support.trl_grpo JOB        a `TrlJob` as JSON

One process, its own `train` loop and defaults; answers come from `transformers.generate`. It ends when the
mean reward of three steps is the goal, or after the last step. Each step adds a line to the job's log.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

from benchmarks.support.grpo_plan import TrlJob, goal_reached, read_rows
from benchmarks.support.written_code import computed
from penstock.common import die_with_parent
from penstock.datasets import BadExpression

TRACEBACK_LINES = 6
"""As many as Penstock's `python` tool shows."""
CHECKED_PROMPTS = 8


class OtherTokens(Exception):
    """TRL's prompt is not what Penstock's model reads."""


def main() -> None:
    die_with_parent()
    job = TrlJob.read(sys.argv[1])
    torch.set_num_threads(job.threads)
    set_seed(job.plan.seed)
    rows = read_rows(job.plan.rows)
    log = StepLog(Path(job.log), job.plan.goal)
    trainer = make_trainer(job, rows, log)
    check_prompts(trainer, rows[:CHECKED_PROMPTS])
    trainer.train()


def make_trainer(job: TrlJob, rows: Sequence[dict[str, Any]], log: StepLog) -> GRPOTrainer:
    plan = job.plan
    model = AutoModelForCausalLM.from_pretrained(plan.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=plan.learning_rates[0], betas=plan.betas, eps=plan.eps, weight_decay=plan.weight_decay
    )
    shares = [rate / plan.learning_rates[0] for rate in plan.learning_rates]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: shares[min(step, len(shares) - 1)])
    return GRPOTrainer(
        model=model,
        reward_funcs=reward_of(job.reward, log),
        args=config_of(job),
        train_dataset=Dataset.from_list([{name: row[name] for name in COLUMNS} for row in rows]),
        processing_class=tokenizer_of(job),
        tools=None if job.tool is None else [python_tool(job)],
        callbacks=[log],
        optimizers=(optimizer, schedule),
    )


COLUMNS = ("prompt", "ground_truth", "data_source")


def config_of(job: TrlJob) -> GRPOConfig:
    plan = job.plan
    return GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="penstock-bench-trl-", dir=Path(job.log).parent),
        seed=plan.seed,
        max_steps=len(plan.learning_rates),
        per_device_train_batch_size=job.micro_rows,
        gradient_accumulation_steps=plan.episodes // job.micro_rows,
        num_generations=plan.group_size,
        max_completion_length=plan.max_response_tokens,
        max_tool_calling_iterations=None if job.tool is None else plan.max_turns - 1,
        generation_kwargs={"max_new_tokens": plan.max_new_tokens},
        temperature=plan.temperature,
        top_p=plan.top_p,
        top_k=plan.top_k,
        max_grad_norm=plan.max_grad_norm,
        epsilon=plan.clip_low,
        epsilon_high=plan.clip_high,
        bf16=False,
        gradient_checkpointing=False,  # no other side computes activations twice
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )


def tokenizer_of(job: TrlJob) -> Any:
    """The model's own, whose template shows the tool as Penstock's prompt does, whatever TRL reads from a docstring."""
    tokenizer = AutoTokenizer.from_pretrained(job.plan.model)
    if job.tool is None:
        return tokenizer
    shown = f"{{%- if tools %}}{{%- set tools = {json.dumps([job.tool])} %}}{{% endif %}}"
    tokenizer.chat_template = shown + tokenizer.chat_template
    tokenizer.response_template = qwen3_template
    return tokenizer


def check_prompts(trainer: GRPOTrainer, rows: Sequence[dict[str, Any]]) -> None:
    """Raises `OtherTokens`."""
    found, _, _ = trainer._tokenize_prompts([row["prompt"] for row in rows])
    for row, ids in zip(rows, found, strict=True):
        if list(ids) != row["prompt_ids"]:
            raise OtherTokens(f"{row['prompt']}: TRL's ids {ids}, Penstock's {row['prompt_ids']}")


def python_tool(job: TrlJob) -> Callable[[str], str]:
    def python(code: str) -> str:
        """Run Python code. Variables persist between calls.

        Args:
            code: Python code.
        """
        return answer_here(code) if job.command is None else answer_of_box(job.command, code, job.tool_timeout_s)

    return python


def answer_here(code: str) -> str:
    try:
        return computed(code)
    except BadExpression as error:
        return f"Error: {error}"


def answer_of_box(command: Sequence[str], code: str, timeout_s: float) -> str:
    """A new box for each call, written as Penstock's tool writes its results."""
    try:
        ended = subprocess.run(
            [*command, code], check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return "Error: the code ran longer than it may and was stopped."
    lines = [ended.stdout.rstrip()]
    if ended.returncode:
        lines.append("\n".join(ended.stderr.rstrip().splitlines()[-TRACEBACK_LINES:]))
    return "\n".join(line for line in lines if line) or "(no output)"


def reward_of(file: str, log: StepLog) -> Callable[..., list[float]]:
    """The recipe's own reward, of all that follows the prompt as text."""
    specification = importlib.util.spec_from_file_location("recipe_reward", file)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)

    def reward(completions: list[Any], ground_truth: list[Any], data_source: list[str], **_: Any) -> list[float]:
        texts = [last_text(messages) for messages in completions]
        scores = [
            module.compute_score(source, text, truth, {"final_text": text})
            for source, text, truth in zip(data_source, texts, ground_truth, strict=True)
        ]
        log.rewards += scores
        return scores

    return reward


def last_text(messages: Sequence[dict[str, Any]]) -> str:
    """Of the model's last turn; empty where that turn calls a tool, or nothing came after the tool's answer."""
    last = messages[-1]
    return "" if last["role"] != "assistant" or last.get("tool_calls") else last["content"]


class StepLog(TrainerCallback):
    """Writes a line per step, and ends the training at the goal."""

    def __init__(self, path: Path, goal: float) -> None:
        self._path, self._goal = path, goal
        self.rewards: list[float] = []
        """Of this step's episodes"""
        self._means: list[float] = []
        self._lr = 0.0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        self._lr = optimizer.param_groups[0]["lr"]

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if not logs or "completions/mean_length" not in logs:
            return
        episodes, self.rewards = self.rewards, []
        self._means.append(sum(episodes) / len(episodes))
        line = {
            "step": state.global_step - 1,
            "reward": self._means[-1],
            "episodes": len(episodes),
            "sampled_tokens": round(logs["completions/mean_length"] * len(episodes)),
            "lr": self._lr,
            "called": logs.get("tools/call_frequency", 0.0),
        }
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if goal_reached(self._means, self._goal):
            control.should_training_stop = True


if __name__ == "__main__":
    main()
