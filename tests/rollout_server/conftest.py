"""A tiny random Qwen3, plain forward passes to compare engines with, and weights to publish."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.living import alive
from tests.rollout_server.precision import HEAD_DIM, plain_greedy, plain_logprobs, rounded
from tests.tiny_model import save_tiny_model
from tests.virtual_clock import VirtualClock

from penstock.rollout_server import (
    AnswerBuilder,
    Chunk,
    Engine,
    EngineError,
    GenerateRequest,
    Generation,
    RolloutClient,
    RolloutConfig,
    Sampling,
    ServerJob,
    serve,
)
from penstock.rollout_server.protocol import extend_spans
from penstock.testing import FakeEngine, MemoryTransferQueue, fake_manifest, next_token
from penstock.transfer_queue import (
    Announcement,
    AnnouncementMark,
    QueueUnavailable,
    RunContext,
    ServerInfo,
    Status,
    WeightUpdate,
)
from penstock.weight_sync import Manifest

VOCAB = 512
TOKEN = "a-token-of-this-run"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a Qwen3 with hidden 64, 2 layers, 512 ids; deterministic."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tiny-qwen3")
    return save_tiny_model(
        folder,
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=192,
        head_dim=HEAD_DIM,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        initializer_range=0.08,
        dtype="float32",
    )


def join_chunks(left: Chunk, right: Chunk) -> Chunk:
    """One chunk with the content of both, in order."""
    spans = list(left.version_spans)
    extend_spans(spans, right.version_spans, len(left.token_ids))
    return Chunk(
        token_ids=left.token_ids + right.token_ids,
        logprobs=left.logprobs + right.logprobs,
        version_spans=spans,
        finish_reason=right.finish_reason,
        routed_experts=left.routed_experts + right.routed_experts,
    )


class Reference:
    """The same model without any engine: plain forward passes, and other weights of the same shape."""

    def __init__(self, folder: str, directory: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from penstock.weight_sync import WeightPublisher

        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.first = {name: rounded(tensor.detach()).clone() for name, tensor in self.model.named_parameters()}
        self.use(self.first)
        self.publisher = WeightPublisher(directory, "shm", keep=8)

    def use(self, tensors: dict[str, Any]) -> None:
        with self.torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(tensors[name])  # a tied head is no parameter of its own

    def other(self, seed: int) -> dict[str, Any]:
        """Weights unlike the first ones: their greedy answers differ."""
        generator = self.torch.Generator().manual_seed(seed)
        return {
            name: rounded(tensor + 0.05 * self.torch.randn(tensor.shape, generator=generator))
            for name, tensor in self.first.items()
        }

    def publish(self, version: int, tensors: dict[str, Any]) -> Manifest:
        return self.publisher.write(version, tensors.items())

    def logprobs(self, context: list[int], sampled: list[int], temperature: float = 1.0) -> list[float]:
        return plain_logprobs(self.model, context, sampled, temperature)

    def greedy(self, context: list[int], count: int) -> list[int]:
        return plain_greedy(self.model, context, count)


@pytest.fixture
def reference(tiny_model: str, tmp_path: Path) -> Reference:
    return Reference(tiny_model, tmp_path / "weights")


def small_config(**changes: Any) -> RolloutConfig:
    settings: dict[str, Any] = {
        "max_model_len": 512,
        "max_concurrent": 16,
        "kv_cache_tokens": 4096,
        "start_timeout_s": 500.0,
        "request_timeout_s": 200.0,
    }
    return RolloutConfig(**{**settings, **changes})


def ask(token_ids: list[int], max_new_tokens: int = 16, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(token_ids=token_ids, sampling=Sampling(max_new_tokens=max_new_tokens, **sampling))


async def begun(client: RolloutClient, requests: Sequence[GenerateRequest]) -> list[asyncio.Task[Generation]]:
    """Answers under way, each with tokens here: what a server that dies now has sampled goes on at the next."""

    async def one(request: GenerateRequest, arrived: asyncio.Event) -> Generation:
        answer, handed_on = AnswerBuilder(request), list[int]()
        async with aclosing(client._stream(answer)) as chunks:
            async for chunk in chunks:
                handed_on += chunk.token_ids
                arrived.set()
        assert handed_on == answer.token_ids, "a stream repeats no token and drops none"
        return answer.build()

    events = [asyncio.Event() for _ in requests]
    tasks = [asyncio.create_task(one(*pair)) for pair in zip(requests, events, strict=True)]
    async with asyncio.timeout(200):
        await asyncio.gather(*(event.wait() for event in events))
    return tasks


async def whole(
    engine: Engine, request: GenerateRequest, on_chunk: Callable[[Chunk], None] | None = None
) -> Generation:
    """The answer in one piece; checks what must hold for every answer."""
    total = Chunk()
    async for chunk in engine.generate(request):
        total = join_chunks(total, chunk)
        if on_chunk:
            on_chunk(chunk)
    check_answer(total.token_ids, total.logprobs, total.version_spans)
    assert total.finish_reason is not None
    return Generation(total.token_ids, total.logprobs, total.version_spans, total.finish_reason)


def check_answer(ids: list[int], logprobs: list[float], spans: list[tuple[int, int, int]]) -> None:
    """One logprob per id; spans cover all ids once, in order, versions growing."""
    assert len(ids) == len(logprobs)
    assert all(value <= 0.0 for value in logprobs)
    assert [start for _, start, _ in spans] == [0, *[end for _, _, end in spans[:-1]]] or not ids
    assert not ids or spans[-1][2] == len(ids)


def _unless_down(name: str) -> Any:
    async def call(queue: RunQueue, *arguments: Any) -> Any:
        if queue.down:
            raise QueueUnavailable("the queue is down")
        return await getattr(MemoryTransferQueue, name)(queue, *arguments)

    return call


class RunQueue(MemoryTransferQueue):
    """The queue in memory. A test sets what is announced, older versions too; entries of servers do not expire."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        super().__init__(clock=self.clock)
        self._config = "a test's"
        self.registered: dict[str, ServerInfo] = {}
        self.heartbeats: list[ServerInfo] = []
        self.splits: dict[str, dict[str, int]] = {}
        """Of evaluations, as `Status.other_splits`."""
        self.down = False
        """Calls raise `QueueUnavailable`."""
        self.manifests_read = 0

    report_update, report_usage, take_turn = map(_unless_down, ("report_update", "report_usage", "take_turn"))
    _status, _latest_version = map(_unless_down, ("status", "latest_version"))

    def announce(self, version: int, **manifest: str) -> None:
        self.announced = Announcement(version, fake_manifest(version, **manifest))

    @property
    def announced(self) -> Announcement | None:
        return self._state.announcement

    @announced.setter
    def announced(self, announcement: Announcement | None) -> None:
        self._state.announcement = announcement

    @property
    def reported(self) -> list[WeightUpdate]:
        return list(self._updates)

    async def latest_version(self) -> Announcement | None:
        self.manifests_read += 1
        return await self._latest_version()

    async def latest_mark(self) -> AnnouncementMark | None:
        await self._status()
        known = self.announced
        return known and AnnouncementMark(known.version, repr(known.manifest))  # of malformed manifests too

    async def heartbeat(self, server: ServerInfo) -> None:
        await self._status()
        self.registered[server.server_id] = server
        self.heartbeats.append(server)

    async def deregister(self, server_id: str) -> None:
        await self._status()
        self.registered.pop(server_id, None)

    async def servers(self) -> list[ServerInfo]:
        await self._status()
        return list(self.registered.values())

    async def status(self) -> Status:
        return replace(await self._status(), other_splits=self.splits)


@pytest.fixture
def queue() -> RunQueue:
    return RunQueue()


@pytest.fixture
async def client(queue: RunQueue) -> AsyncIterator[RolloutClient]:
    made = RolloutClient(queue, TOKEN, timeout_s=200)
    yield made
    await made.close()


@dataclass
class RunningServer:
    """A rollout server in this process and every engine it has started."""

    queue: RunQueue
    task: asyncio.Task[None]
    engines: list[Engine]
    name: str

    address: str = ""

    @property
    def url(self) -> str:
        """Known also once it has left the registry."""
        if self.name in self.queue.registered:
            self.address = self.queue.registered[self.name].url
        return self.address

    @property
    def engine(self) -> Any:
        return self.engines[-1]

    async def until(self, condition: Callable[[], bool], timeout_s: float = 200.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                if self.task.done():
                    self.task.result()
                await asyncio.sleep(0.01)

    async def post(self, body: Any, path: str = "/generate", headers: Mapping[str, str] = HEADERS) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self.url, timeout=200) as http:
            return await http.post(path, json=body, headers=headers)

    async def get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self.url, timeout=200) as http:
            return await http.get(path, headers=HEADERS)

    async def status(self, path: str, condition: Callable[[dict[str, Any]], bool] = lambda _: True) -> dict[str, Any]:
        """JSON of a GET, asked for until it fulfils the condition."""
        async with asyncio.timeout(200):
            while not condition(found := (await self.get(path)).json()):
                await asyncio.sleep(0.02)
        return dict(found)

    async def up(self, timeout_s: float = 200.0) -> None:
        registered = self.queue.registered
        await self.until(lambda: self.name in registered and registered[self.name].accepting, timeout_s)


@asynccontextmanager
async def rollout_server(
    queue: RunQueue,
    folder: Path,
    *,
    name: str = "s0",
    model: str = "fake",
    token_s: float = 0.0,
    new_engine: Any = None,
    up: bool = True,
    **job: Any,
) -> AsyncIterator[RunningServer]:
    """A server with fake engines (or those of `new_engine`), `up` unless it cannot be; cancelled at the end."""
    engines: list[Engine] = []

    def remember(config: RolloutConfig, model: str, log_dir: Path, seed: int) -> Engine:
        make = new_engine or partial(FakeEngine, token_s=token_s)
        engines.append(make(config, model, log_dir, seed))
        return engines[-1]

    run = RunContext(queue, model, TOKEN)
    server_job = ServerJob(name, run, log_dir=folder, **{"config": small_config(), "drain_s": 5.0, **job})
    running = RunningServer(queue, asyncio.create_task(serve(server_job, remember)), engines, name)
    try:
        if up:
            await running.up(server_job.config.start_timeout_s)
        yield running
    finally:
        running.task.cancel()
        await asyncio.gather(running.task, return_exceptions=True)


def answer_of(response: httpx.Response) -> tuple[list[int], list[Any], str]:
    """(ids, spans, finish reason) of NDJSON; every line but an error is checked."""
    ids: list[int] = []
    spans: list[Any] = []
    last: dict[str, Any] = {}
    for last in (json.loads(line) for line in response.text.splitlines() if line):
        if "error" not in last:
            check_answer(last["token_ids"], last["logprobs"], last["version_spans"])
            ids, spans = ids + last["token_ids"], spans + last["version_spans"]
    return ids, spans, last["error"]["field"] if "error" in last else last["finish_reason"]


def body(count: int = 5, **changes: Any) -> dict[str, Any]:
    """Of POST /generate."""
    return {"token_ids": [1], "sampling": {"max_new_tokens": count}, **changes}


def fake_answer(context: list[int], count: int, version: int = 0) -> list[int]:
    """What any fake engine at `version` answers."""
    ids = list(context)
    for _ in range(count):
        ids.append(next_token(ids, version)[0])
    return ids[len(context) :]


def members(group: int) -> list[int]:
    """Living processes of a process group."""
    numbers = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in numbers if alive(pid) and _group_of(pid) == group]


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


async def skip_without(name: str) -> None:
    """Skip, saying how to get it, where no environment with the stock server `name` is found."""
    from penstock.rollout_server import find_installation

    try:
        if name in ("vllm", "sglang"):
            await find_installation(RolloutConfig(engine=name))
    except EngineError as error:
        pytest.skip(str(error))


os.environ.setdefault("OMP_NUM_THREADS", "1")
