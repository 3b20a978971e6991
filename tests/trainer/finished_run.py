"""What a run against the scripted queue has left in its folder and in the queue."""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors.torch import load_file
from trainer_support import ROWS

from penstock.trainer import TrainJob
from penstock.transfer_queue import DataCursor


def lines(job: TrainJob, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (job.run_dir / name).read_text().splitlines()]


def final_weights(job: TrainJob) -> dict[str, torch.Tensor]:
    return load_file(job.run_dir / "final_model" / "model.safetensors")


def check_accounts(job: TrainJob) -> None:
    steps = job.config.steps
    assert [line["step"] for line in lines(job, "metrics.jsonl")] == list(range(steps))
    recorded = {line["step"]: line["episodes"] for line in lines(job, "steps.jsonl")}
    assert recorded == {s: [e for g in groups for e in g] for s, groups in job.run.queue.steps.items()}
    episodes = [episode for ids in recorded.values() for episode in ids]
    assert len(set(episodes)) == len(episodes) == steps * 8
    assert [a.version for a in job.run.queue.announced] == list(range(1, steps + 1))
    assert job.run.queue.committed == steps
    assert job.run.queue.payloads == job.run.queue.spilled == {}
    assert job.run.queue.place == DataCursor(*divmod(steps * 2, ROWS))
