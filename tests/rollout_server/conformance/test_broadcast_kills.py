"""Whoever is lost in the middle of a broadcast: no answer is lost by it, and no version is labelled wrong.

The trainer stops before a bucket, whose members wait for it then; the victim goes, and the trainer continues.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.broadcasting import BroadcastingTrainer, HeldTrainer, StagedServer
from tests.rollout_server.conformance.subject import BROADCASTS, Subject, broken_off
from tests.rollout_server.conformance.test_faults import resident_bytes
from tests.rollout_server.conformance.test_weights import exactly
from tests.rollout_server.conftest import Reference, members

pytest.importorskip("torch")

from tests.rollout_server.conformance.losses import lose_the_other, lose_the_trainer

from penstock.weight_sync import StagedFetch

pytestmark = [
    pytest.mark.deep,
    pytest.mark.crash,
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.timeout(1800),
    pytest.mark.parametrize("subject", BROADCASTS, indirect=True),
]
ROUNDS = int(os.environ.get("PENSTOCK_KILLS", "6"))
BUCKET_BYTES = 20_000


async def publish_again(trainer: BroadcastingTrainer, version: int, tensors: Any, bucket: int) -> Any:
    """A trainer that was lost publishes the version once it is back, with other weights under its number."""
    await lose_the_trainer(trainer, version, {name: one + 1 for name, one in tensors.items()}, bucket)
    return await trainer.publish(version, tensors, members=1)


async def test_losses_in_mid_bucket_cost_no_answer_and_no_version(
    subject: Subject, reference: Reference, tmp_path: Path
) -> None:
    trainer, chosen, fallback = subject.trainer, random.Random(0), StagedServer(tmp_path / "files")
    assert trainer is not None
    trainer.files.broadcaster.bucket_bytes = BUCKET_BYTES
    buckets = sum(tensor.nbytes for tensor in reference.first.values()) // BUCKET_BYTES
    fetch = StagedFetch(subject.fetch._member, fallback)  # type: ignore[arg-type]
    versions = [await subject.hold_first(reference)]
    by_broadcast = 0
    for number in range(ROUNDS):
        tasks = await subject.under_load(2)
        version, tensors = next(subject.versions), reference.other(100 + number)
        lose = publish_again if number % 2 else lose_the_other
        manifest = await lose(trainer, version, tensors, chosen.randrange(1, buckets))
        files = fallback.by_file
        subject.reports.append(await subject.engine.load_weights(await fetch(manifest)))
        by_broadcast += fallback.by_file == files
        versions.append(version)
        subject.holds_first = False
        for answer in await asyncio.gather(*tasks):
            assert len(answer.token_ids) == subject.long
            assert [span[0] for span in answer.version_spans] in (versions[-2:], versions[-1:], versions[-2:-1])
            assert answer.version_spans[0][1] == 0
            assert answer.version_spans[-1][2] == subject.long
        await exactly(subject, reference, version, tensors)
    await fallback.close()
    assert fallback.by_file >= ROUNDS // 2, "who lost a broadcast takes the file"
    assert by_broadcast + fallback.by_file == ROUNDS


@pytest.mark.ends_engine
async def test_engine_killed_in_mid_bucket_takes_the_file_when_it_is_back(
    subject: Subject, reference: Reference, tmp_path: Path
) -> None:
    trainer = subject.trainer
    assert trainer is not None
    trainer.files.broadcaster.bucket_bytes = BUCKET_BYTES
    await asyncio.gather(*await subject.under_load(2, 4))  # the first answers of an engine may take long to begin
    version, tensors = next(subject.versions), reference.other(99)
    held = HeldTrainer(trainer, 3)
    publishing = asyncio.create_task(trainer.publish(version, tensors, members=1))
    await held.reached()
    victim = max(members(subject.process_group), key=resident_bytes)
    tasks = await subject.under_load(2)  # now, that none is whole before the kill
    os.kill(victim, signal.SIGKILL)
    held.go_on.set()
    manifest = await publishing
    await broken_off(tasks)
    late = await Subject.start(subject.name, subject.model, tmp_path)
    fallback = StagedServer(tmp_path / "files")
    try:
        assert (await late.engine.load_weights(await fallback(manifest))).version == version
        await exactly(late, reference, version, tensors)
    finally:
        await fallback.close()
        await late.stop()
