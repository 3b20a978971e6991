"""The loop of fine-tuning: which rows a step trains, the file of conversations, steps that are not finite."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from tests.tiny_model import save_poisoned_model
from trainer_support import make_segment

from penstock.trainer import (
    BadJob,
    ConversationFile,
    SftConfig,
    SftJob,
    TrainerConfig,
    TrainingDiverged,
    fine_tune,
    steps_of,
    write_conversations,
)
from penstock.trainer.data.rows import DataStream
from penstock.trainer.sft.fine_tune import rows_of_step

pytestmark = pytest.mark.torch


@settings(max_examples=50)
@given(count=st.integers(1, 40), batch=st.integers(1, 9), epochs=st.integers(1, 4))
def test_every_epoch_has_every_row_once(count: int, batch: int, epochs: int) -> None:
    """Whatever the batch; a step's rows follow from seed and step alone."""
    steps = -(-count * epochs // batch)
    order = DataStream(count, 3, shuffle=True)
    seen = [row for step in range(steps) for row in rows_of_step(order, step, batch, count)]
    for epoch in range(epochs):
        assert Counter(seen[epoch * count : (epoch + 1) * count]) == Counter(range(count))
    again = rows_of_step(DataStream(count, 3, shuffle=True), steps - 1, batch, count)
    assert again == seen[-batch:]


def test_steps_follow_from_epochs() -> None:
    assert steps_of(SftConfig(epochs=2, batch=16), 100) == 13
    assert steps_of(SftConfig(epochs=0.1, batch=16), 3) == 1
    assert steps_of(SftConfig(steps=7), 1000) == 7


def test_what_is_written_is_read(tmp_path: Path) -> None:
    segments = [make_segment(np.random.default_rng(n), 0, prompt=3 + n, response=9 + n) for n in range(5)]
    write_conversations(tmp_path / "file", segments)
    found = ConversationFile(tmp_path / "file")
    assert len(found) == 5
    for number, segment in enumerate(segments):
        read = found.segment(number)
        assert found.tokens(number) == len(segment.prompt_ids) + len(segment.response_ids)
        np.testing.assert_array_equal(
            np.concatenate([read.prompt_ids, read.response_ids]),
            np.concatenate([segment.prompt_ids, segment.response_ids]),
        )
        np.testing.assert_array_equal(read.response_mask, segment.response_mask)


def job(folder: Path, model: str, **trainer: Any) -> SftJob:
    dice = np.random.default_rng(0)
    write_conversations(folder / "train", [make_segment(dice, 0) for _ in range(6)])
    config = TrainerConfig(**{"steps": 4, "sinks": (), "checkpoint_every": 2, **trainer})
    return SftJob(model, config, SftConfig(batch=3, lr=1e-2), folder, folder / "train", folder / "train")


async def test_the_loss_of_the_first_step_is_the_models_own(tmp_path: Path, tiny_model: str) -> None:
    """Mean negative log-likelihood of the sampled tokens, and of no other, by transformers' own forward."""
    from transformers import AutoModelForCausalLM

    given = job(tmp_path, tiny_model)
    await fine_tune(given)
    first = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    file = ConversationFile(given.train)
    model, sums = AutoModelForCausalLM.from_pretrained(tiny_model), []
    for number in rows_of_step(DataStream(len(file), 0, shuffle=True), 0, 3, len(file)):
        segment = file.segment(number)
        ids = torch.tensor(np.concatenate([segment.prompt_ids, segment.response_ids]).astype(np.int64))
        logprobs = model(ids[None]).logits[0].log_softmax(-1)
        targets = np.flatnonzero(segment.response_mask) + len(segment.prompt_ids)
        sums += [float(-logprobs[at - 1, ids[at]].detach()) for at in targets]
    assert first["tokens_trained"] == len(sums)
    assert first["loss"] == pytest.approx(sum(sums) / len(sums), rel=1e-5)
    evaluations = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    assert [line["version"] for line in evaluations] == [0, 4]
    assert evaluations[1]["loss"] < evaluations[0]["loss"]


async def test_steps_that_are_not_finite_end_it(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    poisoned = save_poisoned_model(tmp_path / "model")
    with pytest.raises((TrainingDiverged, BadJob), match=r"not finite|NaN"):
        await fine_tune(job(tmp_path, poisoned, max_bad_steps=1))


async def test_another_engine_is_refused(tmp_path: Path, tiny_model: str) -> None:
    with pytest.raises(BadJob, match=r"trainer\.engine is megatron"):
        await fine_tune(job(tmp_path, tiny_model, engine="megatron"))
