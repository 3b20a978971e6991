"""An engine under test, and what tests do with any of them."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.broadcasting import TOKEN as BROADCAST_TOKEN
from tests.broadcasting import BroadcastingTrainer
from tests.rollout_server.conftest import VOCAB, Reference, ask, members, small_config, whole
from tests.rollout_server.precision import arithmetic, assert_close, assert_greedy, common, tolerance, with_share

from penstock.common import cancel_and_wait
from penstock.rollout_server import (
    Chunk,
    EngineError,
    EngineInfo,
    GenerateRequest,
    Generation,
    RolloutConfig,
    make_engine,
)
from penstock.rollout_server.engines.http.engine import HttpEngine
from penstock.weight_sync import BroadcastMember, LoadReport, StagedFetch

VLLM = pytest.param("vllm", marks=pytest.mark.vllm)
SGLANG = pytest.param("sglang", marks=pytest.mark.sglang)
ENGINES = [
    pytest.param("hf", marks=pytest.mark.torch),
    pytest.param("hf+broadcast", marks=pytest.mark.torch),
    VLLM,
    pytest.param("vllm+broadcast", marks=[pytest.mark.vllm, pytest.mark.deep]),
    SGLANG,
    pytest.param("sglang+broadcast", marks=[pytest.mark.sglang, pytest.mark.deep]),
]
BROADCASTS = [engine for engine in ENGINES if str(engine.values[0]).endswith("+broadcast")]
PROMPT = [(7 * i + 3) % VOCAB for i in range(24)]
SETTINGS: dict[str, dict[str, Any]] = {
    "hf": {},
    "vllm": {
        "max_model_len": 2048,
        "start_timeout_s": 500.0,
        "request_timeout_s": 200.0,
        "vllm_args": {"disable_log_stats": None},
    },
    "sglang": {"max_model_len": 2048, "kv_cache_tokens": 20480, "start_timeout_s": 500.0, "request_timeout_s": 200.0},
}
"""RolloutConfig changes per engine."""
LONG = {"hf": 450, "vllm": 1900, "sglang": 600}
"""Tokens of an answer that is still going on when the test has done what it must do meanwhile."""
SEEDS = {"hf", "vllm"}
"""Engines that honour a seed; the others refuse it, and say so at start."""


@dataclass
class Subject:
    """An engine that was started, and the versions that it has seen."""

    name: str
    engine: Any
    info: EngineInfo
    model: str
    logs: Path
    versions: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    """Not used yet."""
    reports: list[LoadReport] = field(default_factory=list)
    others: dict[str, Subject] = field(default_factory=dict)
    """Engines in processes of their own, by `rollout.pause`."""
    holds_first: bool = True
    """The weights of the model folder, under whatever version."""
    trainer: BroadcastingTrainer | None = None
    """Versions come by its broadcasts; None: as files."""
    member: asyncio.Task[None] | None = None
    """Stages its broadcasts."""
    fetch: Any = None

    @classmethod
    async def start(cls, name: str, model: str, logs: Path, **changes: Any) -> Subject:
        """`name` of an engine; with ``+broadcast`` its versions come by broadcast."""
        name, _, broadcast = name.partition("+")
        engine = make_engine(engine_config(name, **changes), model, logs, 0)
        subject = cls(name, engine, await engine.start(), model, logs)
        if broadcast:
            await subject._join(logs / "published")
        return subject

    async def _join(self, folder: Path) -> None:
        self.trainer = BroadcastingTrainer(folder, full_every=10_000, bucket_bytes=100_000)
        await self.trainer.files.open()
        member = BroadcastMember(BROADCAST_TOKEN)
        self.fetch = StagedFetch(member, None)  # what it does not hold would be fetched: no test may come to that
        self._stage_by(member, self.trainer)

    def _stage_by(self, member: BroadcastMember, trainer: BroadcastingTrainer) -> None:
        self.member = asyncio.create_task(member.run(self.engine, lambda: trainer.meeting))

    @asynccontextmanager
    async def staging_nothing(self) -> AsyncIterator[BroadcastingTrainer]:
        """The trainer, whose broadcasts reach the engine only through a member that the test runs."""
        assert self.trainer is not None
        assert self.member is not None
        await cancel_and_wait([self.member])
        try:
            yield self.trainer
        finally:
            self._stage_by(self.fetch._member, self.trainer)

    async def stop(self) -> None:
        if self.member is not None and self.trainer is not None:
            await cancel_and_wait([self.member])
            await self.trainer.files.close()
        await self.engine.stop()

    @property
    def long(self) -> int:
        return LONG[self.name]

    @property
    def process_group(self) -> int:
        """Of all processes of the engine."""
        found = self.engine.server.pid if isinstance(self.engine, HttpEngine) else self.engine.process.pid
        assert found is not None
        return int(found)

    def send(self, number: signal.Signals) -> None:
        """To every process of the engine."""
        for pid in members(self.process_group):
            os.kill(pid, number)

    @property
    def rounds(self) -> bool:
        """Tokens of nearly equal logprobs may change places, see `precision`."""
        return arithmetic(self.name) != "float32"

    def close(self, found: list[float], expected: list[float]) -> None:
        assert_close(found, expected, tolerance(self.name))

    def greedy(self, reference: Reference, context: list[int], ids: list[int]) -> None:
        """`ids` is what the reference's weights answer at temperature 0."""
        assert_greedy(self.name, reference, context, ids)

    def same(self, one: tuple[list[int], list[float]], other: tuple[list[int], list[float]]) -> None:
        """Two greedy answers (ids, logprobs) to one prompt; where arithmetic rounds, as far as they are comparable."""
        (ids, logprobs), (other_ids, other_logprobs) = one, other
        if not self.rounds:
            assert ids == other_ids
        upto = common(ids, other_ids) + 1  # the tokens that differ first have the same context, and nearly one logprob
        self.close(logprobs[:upto], other_logprobs[:upto])

    async def load(self, reference: Reference, tensors: Mapping[str, Any]) -> int:
        """The version that the engine has then."""
        return (await self.swap(await self.publish(reference, tensors))).version

    async def publish(self, reference: Reference, tensors: Mapping[str, Any]) -> Any:
        """The manifest of a next version that is with the engine but for the swap: a broadcast has been received."""
        version = next(self.versions)
        if self.trainer is None:
            return reference.publish(version, dict(tensors))
        return await self.fetch(await self.trainer.publish(version, dict(tensors), members=1))

    async def swap(self, manifest: Any) -> LoadReport:
        report: LoadReport = await self.engine.load_weights(manifest)
        assert report.version == manifest.version
        self.reports.append(report)
        self.holds_first = False
        return report

    async def hold_first(self, reference: Reference) -> int:
        """The version under which the engine has the weights of the model folder."""
        if not self.holds_first:
            await self.load(reference, reference.first)
            self.holds_first = True
        return self.reports[-1].version if self.reports else 0

    async def under_load(self, count: int, length: int | None = None) -> list[asyncio.Task[Generation]]:
        """Answers to `prompt(i)`, each of which has begun. Raises what ended one before its first token."""
        begun = [asyncio.Event() for _ in range(count)]
        tasks = [
            asyncio.create_task(whole(self.engine, ask(prompt(i), length or self.long), sets(event)))
            for i, event in enumerate(begun)
        ]
        async with asyncio.timeout(180):  # a first answer compiles and warms up, beside another engine's tests
            for task, event in zip(tasks, begun, strict=True):
                first = asyncio.ensure_future(event.wait())
                await asyncio.wait({task, first}, return_when=asyncio.FIRST_COMPLETED)
                if not event.is_set():
                    first.cancel()
                    await task
        return tasks

    @asynccontextmanager
    async def pausing(self, mode: str) -> AsyncIterator[Subject]:
        """With another `rollout.pause`: hf in a separate process, the others are told with each swap anyway."""
        if isinstance(self.engine, HttpEngine):
            weights = self.engine.weights
            before, weights.config = weights.config, weights.config.model_copy(update={"pause": mode})
            try:
                yield self
            finally:
                weights.config = before
            return
        if mode not in self.others:
            kind = f"{self.name}+broadcast" if self.trainer else self.name
            self.others[mode] = await Subject.start(kind, self.model, self.logs / mode, pause=mode)
        yield self.others[mode]

    async def asked_in_one(self, request: GenerateRequest) -> tuple[list[int], list[float]]:
        """(ids, logprobs) of a greedy answer that is not streamed; from hf token by token."""
        if self.name == "hf":
            return await self._token_by_token(request)
        answer = await self._unstreamed(request)
        if self.name == "vllm":
            choice = answer["choices"][0]
            return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]
        return answer["output_ids"], [pair[0] for pair in answer["meta_info"]["output_token_logprobs"]]

    async def _unstreamed(self, request: GenerateRequest) -> dict[str, Any]:
        path = "/inference/v1/generate" if self.name == "vllm" else "/generate"
        body = self.engine._body(request) | {"stream": False}
        answer: dict[str, Any] = await self.engine.server.call("POST", path, body)
        return answer

    async def _token_by_token(self, request: GenerateRequest) -> tuple[list[int], list[float]]:
        ids: list[int] = []
        logprobs: list[float] = []
        for _ in range(request.sampling.max_new_tokens):
            answer = await whole(self.engine, ask(request.token_ids + ids, 1, temperature=0.0))
            ids, logprobs = ids + answer.token_ids, logprobs + answer.logprobs
        return ids, logprobs

    async def reused(self, request: GenerateRequest) -> int:
        """Prompt tokens whose KV the engine had already, as it counts them itself."""
        if self.name == "sglang":
            return int((await self._unstreamed(request))["meta_info"]["cached_tokens"])
        before = await self._reused_so_far()
        await whole(self.engine, request)
        return await self._reused_so_far() - before

    async def _reused_so_far(self) -> int:
        if self.name == "hf":
            return int((await self.engine.ping())["reused_tokens"])
        return int(await self._vllm_metric("prefix_cache_hits_total"))

    async def _vllm_metric(self, name: str) -> float:
        async with self.engine.server.http.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))

    async def running(self) -> int:
        """Requests in the engine, as it counts them itself."""
        if self.name == "hf":
            return int((await self.engine.ping())["in_flight"])
        if self.name == "vllm":
            return int(
                await self._vllm_metric("num_requests_running") + await self._vllm_metric("num_requests_waiting")
            )
        loads = (await self.engine.server.call("GET", "/v1/loads"))["loads"]
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


def engine_config(name: str, **changes: Any) -> RolloutConfig:
    """Of an engine `name` of these tests: several share this machine's GPU."""
    return small_config(engine=name, **with_share(name, {**SETTINGS[name], **changes}))


def prompt(i: int) -> list[int]:
    """Several that differ from their first token on, so that none shares a prefix."""
    return [(11 * i + 5) % VOCAB, *PROMPT[:19]]


async def broken_off(tasks: list[asyncio.Task[Generation]]) -> None:
    """Every answer ends with an error after which another server may try."""
    async with asyncio.timeout(200):
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    for outcome in outcomes:
        assert isinstance(outcome, EngineError)
        assert outcome.retryable


async def gone(group: int) -> None:
    """No process of the group is left."""
    deadline = time.monotonic() + 60
    while left := members(group):
        assert time.monotonic() < deadline, left
        await asyncio.sleep(0.05)


def sets(event: asyncio.Event) -> Callable[[Chunk], None]:
    """Called with each chunk: the first with tokens sets `event`."""
    return lambda chunk: event.set() if chunk.token_ids else None
