"""TRL's GRPOTrainer, its own `train` loop and defaults; `rollout_func` hands it answers that are there already.

main thread                     thread of trainer.train()
step() ── go ────────────────►  on_step_begin: the clock starts
                                rewards, advantages, micro-batches, clipping, update
       ◄──────────────── Done   on_step_end: it stops; on_log: the gradient's norm is known
"""

from __future__ import annotations

import queue
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.support import train_side
from benchmarks.support.meter import Meter
from benchmarks.support.train_side import Done, Settings
from benchmarks.support.work import Work

STEP_TIMEOUT_S = 3600.0
STOP_TIMEOUT_S = 60.0


class TrlSide:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._clock = _Clock()
        self._thread: threading.Thread | None = None

    def load(self, work: Work) -> None:
        """Once: a trainer has one dataset."""
        assert self._thread is None, "TRL's trainer was given its batch before"
        trainer = _trainer(self._settings, work, self._clock)
        self._thread = threading.Thread(target=self._clock.run, args=(trainer,), name="trl", daemon=True)
        self._thread.start()

    def step(self, *, memory: bool = False) -> Done:
        self._clock.asked.put(memory)
        found = self._clock.answers.get(timeout=STEP_TIMEOUT_S)
        if isinstance(found, BaseException):
            raise found
        return found

    def close(self) -> None:
        if self._thread is not None:
            self._clock.asked.put(None)
            self._thread.join(STOP_TIMEOUT_S)


class _Clock(TrainerCallback):
    """Lets the trainer's loop take one step whenever it is asked to."""

    def __init__(self) -> None:
        self.asked: queue.Queue[bool | None] = queue.Queue()
        """Whether the step's memory is measured; None ends the training."""
        self.answers: queue.Queue[Done | BaseException] = queue.Queue()

    def run(self, trainer: GRPOTrainer) -> None:
        try:
            trainer.train()
        except BaseException as error:  # noqa: BLE001 - `step` raises it where it is waited for
            self.answers.put(error)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        memory = self.asked.get()
        if memory is None:
            raise SystemExit
        self._meter = Meter(memory=memory).__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._meter.__exit__(None, None, None)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "grad_norm" in logs:
            meter = self._meter
            self.answers.put(Done(meter.seconds, meter.cpu_s, logs["grad_norm"], meter.peak_bytes))


def _trainer(settings: Settings, work: Work, clock: _Clock) -> GRPOTrainer:
    """Prompts are the numbers of groups; what the model reads comes from `work`."""
    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    return GRPOTrainer(
        model=model,
        reward_funcs=lambda prompts, **_: [work.reward(row) for row in _rows(prompts, work)],
        rollout_func=lambda prompts, _trainer: _answers(_rows(prompts, work), work),
        args=_config(settings, work),
        train_dataset=Dataset.from_dict({"prompt": [str(n) for n in range(len(work.lengths) // work.group_size)]}),
        processing_class=_tokenizer(work.vocab),
        callbacks=[clock],
    )


def _config(settings: Settings, work: Work) -> GRPOConfig:
    if len(work.lengths) % settings.micro_rows:
        raise ValueError(f"TRL wants a number of rows that {settings.micro_rows} divides")
    return GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="penstock-bench-trl-"),
        per_device_train_batch_size=settings.micro_rows,
        gradient_accumulation_steps=len(work.lengths) // settings.micro_rows,
        num_generations=work.group_size,
        max_completion_length=max(work.lengths),
        learning_rate=train_side.LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta1=train_side.BETAS[0],
        adam_beta2=train_side.BETAS[1],
        weight_decay=0.0,
        max_grad_norm=train_side.MAX_GRAD_NORM,
        epsilon=train_side.CLIP_LOW,
        epsilon_high=train_side.CLIP_HIGH,
        bf16=settings.dtype == "bfloat16",
        gradient_checkpointing=False,  # no other side computes activations twice
        shuffle_dataset=False,
        max_steps=1_000_000,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )


def _rows(prompts: Sequence[str], work: Work) -> list[int]:
    """Index of each prompt's row: a group's number stands there once for each of its members."""
    seen: Counter[str] = Counter()
    rows = []
    for prompt in prompts:
        rows.append(int(prompt) * work.group_size + seen[prompt])
        seen[prompt] += 1
    return rows


def _answers(rows: Sequence[int], work: Work) -> dict[str, Any]:
    ids = [work.row(row).tolist() for row in rows]
    return {
        "prompt_ids": [one[: work.prompt] for one in ids],
        "completion_ids": [one[work.prompt :] for one in ids],
        "logprobs": None,
    }


def _tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """Id i is the word ``t{i}``: TRL decodes every answer for its reward functions."""
    words = {f"t{number}": number for number in range(vocab)}
    backend = Tokenizer(models.WordLevel(words, unk_token="t1"))  # noqa: S106 - no password
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = {"pad_token": "t0", "eos_token": "t1"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **marks)
