"""Broadcasts received in place: a loss in mid-bucket, of any member, loses no answer and labels none wrong.

The engines are those that receive broadcasts staged, too: here their members receive in place for a while.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.broadcasting import TOKEN, BroadcastingTrainer, StagedServer
from tests.rollout_server.conformance.subject import PROMPT, Subject
from tests.rollout_server.conformance.test_weights import exactly
from tests.rollout_server.conftest import Reference, ask, whole
from tests.until import until

pytest.importorskip("torch")

from tests.rollout_server.conformance.losses import lose_the_other, lose_the_trainer

from penstock.common import cancel_and_wait
from penstock.weight_sync import BroadcastMember, InPlaceEngine, StagedFetch, WeightsUnreachable

IN_PLACE = [
    pytest.param("hf+broadcast", marks=pytest.mark.torch),
    pytest.param("vllm+broadcast", marks=[pytest.mark.vllm, pytest.mark.deep]),
]
pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.timeout(900),
    pytest.mark.parametrize("subject", IN_PLACE, indirect=True),
]
ROUNDS = int(os.environ.get("PENSTOCK_KILLS", "2"))
BUCKET_BYTES = 20_000
MIDDLE = 10
"""A bucket after the first tensor: until that is whole vLLM has replaced nothing."""
TOKENS = 120


class InPlaceSubject:
    """An engine whose member receives in place, and that takes files where it must."""

    def __init__(self, subject: Subject, trainer: BroadcastingTrainer, folder: Path) -> None:
        self.subject, self.trainer, self.files = subject, trainer, StagedServer(folder)
        self.engine: Any = subject.engine
        assert isinstance(self.engine, InPlaceEngine)
        self.member = BroadcastMember(TOKEN, in_place=True)
        self.fetch = StagedFetch(self.member, self.files)  # type: ignore[arg-type]
        self.loading = False

    def address(self) -> str:
        return "" if self.engine.stands_still or self.loading else self.trainer.meeting

    async def load(self, manifest: Any) -> Any:
        """As a sidecar does."""
        self.loading = True
        try:
            found = manifest if manifest.transport == "shm" else await self.fetch(manifest)
            report = await self.engine.load_weights(found)
        finally:
            self.loading = False
        self.subject.reports.append(report)
        self.subject.holds_first = False
        return report

    async def waits(self) -> None:
        """For a broadcast: the next one begins at once."""
        await until(lambda: self.trainer.files.broadcaster.parked == 1)

    async def lose(self, what: Any, version: int, tensors: Any, bucket: int) -> Any:
        """`what`: of `losses`. Returns when this member has missed the broadcast."""
        missed = self.member.missed
        manifest = await what(self.trainer, version, tensors, bucket)
        await until(lambda: self.member.missed > missed and not self.member.busy)
        return manifest


async def handed_on(subject: Subject, count: list[int]) -> int:
    """Tokens of an answer once what was sampled before a pause has come: none has for a while."""
    async with asyncio.timeout(60):
        while True:
            so_far = sum(count)
            await subject.running()  # the engine's process may have had no core: what it had to hand on comes first
            await asyncio.sleep(1.0)
            if sum(count) == so_far:
                return so_far


@asynccontextmanager
async def receiving_in_place(subject: Subject, folder: Path) -> AsyncIterator[InPlaceSubject]:
    async with subject.staging_nothing() as trainer:
        broadcaster = trainer.files.broadcaster
        before, broadcaster.bucket_bytes = broadcaster.bucket_bytes, BUCKET_BYTES
        made = InPlaceSubject(subject, trainer, folder)
        task = asyncio.create_task(made.member.run(made.engine, made.address))
        try:
            yield made
        finally:
            await cancel_and_wait([task])
            await made.files.close()
            broadcaster.bucket_bytes = before


async def test_answers_go_on_over_a_version_received_in_place(
    subject: Subject, reference: Reference, tmp_path: Path
) -> None:
    old, crossed = await subject.hold_first(reference), 0
    async with receiving_in_place(subject, tmp_path / "files") as place:
        for seed in range(41, 46):  # on a busy machine the pause may fall between two answers
            version, tensors = next(subject.versions), reference.other(seed)
            await place.waits()
            tasks = await subject.under_load(2)
            report = await place.load(await place.trainer.publish(version, tensors, members=1))
            assert report.pause_s >= report.load_s > 0
            for answer in await asyncio.gather(*tasks):
                assert len(answer.token_ids) == subject.long
                versions = [span[0] for span in answer.version_spans]
                assert versions in ([old], [old, version])
                crossed += len(versions) == 2
            await exactly(subject, reference, version, tensors)
            old = version
            if crossed:
                break
        assert crossed
        assert (place.files.by_file, place.engine.stands_still) == (0, False)


async def test_half_a_version_in_place_answers_nothing(subject: Subject, reference: Reference, tmp_path: Path) -> None:
    """The trainer dies in mid-bucket. The version that the engine had comes back as a file: answers go on under it."""
    version, tensors = next(subject.versions), reference.other(42)
    reference.use(tensors)
    half = reference.other(43)
    async with receiving_in_place(subject, tmp_path / "files") as place:
        await place.load(reference.publish(version, tensors))
        for _ in range(5):  # on a busy machine the answer may end before the pause
            count: list[int] = []
            await place.waits()
            request = ask(PROMPT, subject.long)
            answer = asyncio.create_task(whole(subject.engine, request, lambda one: count.append(len(one.token_ids))))  # noqa: B023
            await until(lambda: bool(count))  # noqa: B023
            await place.lose(lose_the_trainer, next(subject.versions), half, MIDDLE)
            assert place.engine.stands_still
            new = asyncio.create_task(whole(subject.engine, ask(PROMPT, 8)))
            so_far = await handed_on(subject, count)
            stands = not answer.done()
            await asyncio.sleep(0.3)
            assert sum(count) == so_far
            assert not new.done()
            await place.load(reference.publish(version, tensors))
            for found, length in ((await answer, subject.long), (await new, 8)):
                assert found.version_spans == [(version, 0, length)]
                subject.close(found.logprobs, reference.logprobs(PROMPT, found.token_ids))
            if stands:
                break
        assert stands
        await exactly(subject, reference, version, tensors)


async def test_broadcast_in_place_that_brings_nothing_costs_nothing(
    subject: Subject, reference: Reference, tmp_path: Path
) -> None:
    version = await subject.hold_first(reference)
    async with receiving_in_place(subject, tmp_path / "files") as place:
        tasks = await subject.under_load(2, TOKENS)
        await place.lose(lose_the_trainer, next(subject.versions), reference.other(46), 0)
        assert (place.member.missed, place.engine.stands_still) == (1, False)
        for answer in await asyncio.gather(*tasks):
            assert answer.version_spans == [(version, 0, TOKENS)]
        await exactly(subject, reference, version, reference.first)


async def test_what_an_engine_received_in_place_is_no_other_version(
    subject: Subject, reference: Reference, tmp_path: Path
) -> None:
    """Neither one of another broadcast, nor one that was loaded over."""
    async with receiving_in_place(subject, tmp_path / "files") as place:
        first, second = next(subject.versions), next(subject.versions)
        came = await place.trainer.publish(first, reference.other(44), members=1)
        assert await place.member.holds(came)
        await place.load(reference.publish(second, reference.other(45)))
        with pytest.raises(WeightsUnreachable, match="does not hold"):
            await place.engine.load_weights(came)
        await exactly(subject, reference, second, reference.other(45))


@pytest.mark.deep
@pytest.mark.crash
async def test_losses_in_mid_bucket_in_place_cost_no_answer(
    subject: Subject, reference: Reference, tmp_path: Path
) -> None:
    """The trainer and another member are killed: each time the engine stands still until it has a whole file."""
    trainer, chosen = subject.trainer, random.Random(0)
    assert trainer is not None
    buckets = sum(tensor.nbytes for tensor in reference.first.values()) // BUCKET_BYTES
    versions = [await subject.hold_first(reference)]
    async with receiving_in_place(subject, tmp_path / "files") as place:
        for number in range(ROUNDS):
            tasks = await subject.under_load(2, TOKENS)
            version, tensors, at = (
                next(subject.versions),
                reference.other(200 + number),
                chosen.randrange(MIDDLE, buckets),
            )
            if number % 2:
                await place.lose(lose_the_trainer, version, {name: one + 1 for name, one in tensors.items()}, at)
                manifest = reference.publish(version, tensors)
            else:
                manifest = await place.lose(lose_the_other, version, tensors, at)
            assert place.engine.stands_still
            await place.load(manifest)
            versions.append(version)
            for answer in await asyncio.gather(*tasks):
                assert len(answer.token_ids) == TOKENS
                assert [span[0] for span in answer.version_spans] in (versions[-2:], versions[-1:], versions[-2:-1])
            await exactly(subject, reference, version, tensors)
        assert place.member.received == 0
        assert place.files.by_file == (ROUNDS + 1) // 2
