"""The batch that ends a run is in the archive: people look there for the reason."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from trainer_support import make_job

from penstock.trainer import TrainingDiverged, train
from penstock.trainer.losses import LOSSES, LossInput, TokenLoss
from penstock.transfer_queue import Archive


@pytest.fixture
def diverging() -> Iterator[str]:
    """A loss that is infinite."""

    @LOSSES.register("diverging")
    def loss(batch: LossInput) -> TokenLoss:
        result = LOSSES.get("decoupled_ppo")(batch)
        return replace(result, per_token=result.per_token * math.inf)

    yield "diverging"
    LOSSES._entries.pop("diverging", None)


async def test_the_last_batch_is_archived_as_not_learned_and_stays_in_the_queue(
    tmp_path: Path, tiny_model: str, diverging: str
) -> None:
    job = make_job(tmp_path, tiny_model, {"loss": diverging, "max_bad_steps": 1}, archives=True)
    for _ in range(2):  # a resume ends in the same way, and the archive has it once
        with pytest.raises(TrainingDiverged, match=r"step 1: .* 2 steps in a row"):
            await train(job)
        archive = Archive(tmp_path / "archive")
        pending = archive.pending()
        assert list(zip(pending["step"].to_pylist(), pending["episode"].to_pylist(), strict=True)) == [
            (step, name) for step in range(2) for group in job.run.queue.steps[step] for name in group
        ]
        assert len(archive.index()) == 0
        assert len(archive.read(1, pending["episode"].to_pylist()[8:])) == 8
        batch = await job.run.queue.lease_batch(1)
        assert len(await job.run.queue.read(batch.groups[0])) == 4
    assert archive.verify() == []
