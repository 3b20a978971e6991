"""Three processes of a sidecar before a real server: versions over swaps and in place, one of the processes killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest
from tests.broadcasting import broadcasting
from tests.rollout_server.conformance.subject import PROMPT, SGLANG, VLLM, Subject, prompt
from tests.rollout_server.conftest import TOKEN, Mount, Reference, StubQueue, ask, rollout_server

from penstock.rollout_server import AnswerBuilder, Generation, RolloutClient
from penstock.rollout_server.engines.http.answer_labels import NoFollowers
from penstock.transfer_queue import Announcement
from penstock.weight_sync import Manifest, Offer

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(900)]
PROCESSES = 3
ANSWERS = 6


@pytest.mark.deep
@pytest.mark.parametrize("subject", [VLLM, SGLANG], indirect=True)
async def test_every_process_labels_its_tokens_rightly(
    subject: Subject, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token's logprob is that of a plain forward pass of the version that its span names."""

    async def publish(version: int, tensors: dict[str, Any], _members: int) -> Manifest:
        return reference.publish(version, tensors)

    borrow(monkeypatch, subject.engine)
    async with subject.pausing("recompute"):
        await Several(subject, reference, publish).answer_over_versions(tmp_path, sidecar_processes=PROCESSES)


@pytest.mark.deep
@pytest.mark.parametrize("subject", [pytest.param("vllm+broadcast", marks=pytest.mark.vllm)], indirect=True)
async def test_every_process_labels_its_tokens_rightly_over_versions_in_place(
    subject: Subject, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process sends requests or passes on tokens while the engine holds parts of two versions."""
    received: list[str] = []
    receive = subject.engine.receive_weights

    async def counted(offer: Offer) -> str:
        received.append(offer.name)
        return str(await receive(offer))

    borrow(monkeypatch, subject.engine)
    monkeypatch.setattr(subject.engine, "receive_weights", counted)
    async with (
        subject.pausing("recompute"),
        subject.staging_nothing(),
        broadcasting(tmp_path / "published", token=TOKEN, bucket_bytes=20_000) as trainer,
    ):
        several = Several(subject, reference, trainer.publish)
        await several.answer_over_versions(
            tmp_path, sidecar_processes=PROCESSES, weight_transport="broadcast", broadcast_receive="in_place"
        )
    assert len(received) == 3


def length(number: int) -> int:
    """Of the answers to `prompt(number)`: different ones, else all of them begin and end together."""
    return 500 + 70 * number


class Publish(Protocol):
    """Publishes a version; a broadcast begins when `members` servers wait for it."""

    def __call__(self, version: int, tensors: dict[str, Any], members: int, /) -> Awaitable[Manifest]: ...


class Several:
    """A server of several processes, and the versions that it is given."""

    def __init__(self, subject: Subject, reference: Reference, publish: Publish) -> None:
        self.subject, self.reference, self.publish = subject, reference, publish
        self.queue, self.mount = StubQueue(), Mount()
        self.weights: dict[int, dict[str, Any]] = {}

    async def announce(self, tensors: dict[str, Any], members: int = 1) -> int:
        version = next(self.subject.versions)
        self.weights[version] = tensors
        manifest = await self.publish(version, tensors, members)
        self.queue.announced = Announcement(version, manifest.as_dict())
        return version

    async def answer_over_versions(self, folder: Path, **changes: Any) -> None:
        """Three versions under load; one of the processes is killed. The engine has the first weights then."""
        engine, reference, registered = self.subject.engine, self.reference, self.queue.registered
        await self.announce(reference.other(1), members=0)
        async with rollout_server(
            self.queue,
            folder,
            new_engine=lambda *_: engine,
            model=self.subject.model,
            config=engine.config.model_copy(update={"max_restarts": 100, **changes}),
            mount=self.mount,
        ) as server:
            beside = self.mount.sidecar.beside.processes
            await server.until(lambda: all(process.begun for process in beside), 180.0)
            async with Load(self.queue).kept_up() as load:
                for tensors in (reference.other(2), reference.other(3)):
                    version = await self.announce(tensors)
                    await server.until(lambda wanted=version: load.newest == wanted, 180.0)
                while not load.resumed:  # who is killed between two answers breaks off none
                    await server.until(lambda: any(process.begun and process.counts.in_flight for process in beside))
                    busy = max(beside, key=lambda process: (process.begun, process.counts.in_flight))
                    os.kill(busy.pid, signal.SIGKILL)
                    wanted = len(load.answers) + ANSWERS
                    await server.until(lambda wanted=wanted: len(load.answers) >= wanted, 180.0)
            version = await self.announce(reference.first)
            await server.until(lambda: registered["s0"].version == version, 180.0)
        self.subject.holds_first = False
        for number, found in load.answers:
            self.check(number, found)
        assert {version for _, found in load.answers for version, _, _ in found.version_spans} == {*[*self.weights][:3]}
        assert await engine.healthy()
        assert len((await self.subject.asked_in_one(ask(PROMPT, 4, temperature=0.0)))[0]) == 4

    def check(self, number: int, found: Generation) -> None:
        assert len(found.token_ids) == length(number)
        for version, start, end in found.version_spans:
            self.reference.use(self.weights[version])
            expected = self.reference.logprobs(prompt(number), found.token_ids)
            self.subject.close(found.logprobs[start:end], expected[start:end])


class Load:
    """Answers, each followed by another: some are under way whenever something happens, however long it takes."""

    def __init__(self, queue: StubQueue) -> None:
        self.queue = queue
        self.answers: list[tuple[int, Generation]] = []
        """Whole ones, each with the number of its prompt."""
        self.newest = -1
        """Version of any token that came."""
        self.ending = False

    @property
    def resumed(self) -> bool:
        return any(found.resumed for _, found in self.answers)

    @asynccontextmanager
    async def kept_up(self) -> AsyncIterator[Load]:
        """Once every answer has begun; ends with whole ones."""
        begun = [asyncio.Event() for _ in range(ANSWERS)]
        async with asyncio.TaskGroup() as tasks:
            for number, event in enumerate(begun):
                tasks.create_task(self._ask_on(number, event))
            async with asyncio.timeout(180):
                await asyncio.gather(*(event.wait() for event in begun))
            yield self
            self.ending = True

    async def _ask_on(self, number: int, begun: asyncio.Event) -> None:
        while not self.ending:
            answer = AnswerBuilder(ask(prompt(number), length(number)))
            client = RolloutClient(self.queue, TOKEN, 200.0)
            try:
                async with aclosing(client._stream(answer)) as chunks:
                    async for chunk in chunks:
                        begun.set()
                        self.newest = max([self.newest, *(version for version, _, _ in chunk.version_spans)])
            finally:
                await client.close()
            self.answers.append((number, answer.build()))


def borrow(monkeypatch: pytest.MonkeyPatch, engine: Any) -> None:
    """A server may use the engine of all tests, and neither starts nor ends it."""

    async def start() -> Any:
        return engine.info.model_copy(update={"version": engine.weights.version})

    async def stop() -> None:
        engine.share(NoFollowers())

    monkeypatch.setattr(engine, "start", start)
    monkeypatch.setattr(engine, "stop", stop)
