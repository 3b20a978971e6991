"""A training step through `penstock serve` compared with the same step called directly; eight adapters and one.

    penstock bench serve --json

direct             forward, backward and optimizer step of the trainer's part of a service, called in a process
service            the same through HTTP, Redis and the trainer's process of `penstock serve`
service of 8       eight adapters with an eighth of the rows each, through the same service
samples            32 tokens after the beginning of each row, from one adapter
samples of 8       the same from eight adapters, an eighth of the rows each

One model, one batch of rows of one length, one step per round; the sides take turns. A step is one request of gradients
and one of the optimizer, sent together; its time ends when both results are there. Samples are requested together, from
one rollout server with the engine hf.

Environment: PENSTOCK_BENCH_ROUNDS (5), PENSTOCK_BENCH_MODEL (9m; a name of `support.model.SIZES`), PENSTOCK_BENCH_ROWS
(32), PENSTOCK_BENCH_TOKENS (128), PENSTOCK_BENCH_RANK (8).
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import numpy as np

from benchmarks.support.child import stop_run
from benchmarks.support.comparison import say
from benchmarks.support.measure import processor
from benchmarks.support.model import SIZES, save_model, trained_tokenizer
from penstock.common import listen
from penstock.service import DTYPES, INT64, PROTOBUF, message_types

ADAPTERS = 8
PROMPT, SAMPLED = 32, 32
"""Tokens of each sample."""
START_S = 600.0
STEP_S = 600.0
ADAM = {"learning_rate": 1e-4}


@dataclass(frozen=True)
class ServeExtent:
    """How much is measured, from the environment."""

    rounds: int
    model: str
    rows: int
    tokens: int
    rank: int

    @classmethod
    def read(cls) -> ServeExtent:
        names = (("ROUNDS", "5"), ("ROWS", "32"), ("TOKENS", "128"), ("RANK", "8"))
        rounds, rows, tokens, rank = (int(os.environ.get(f"PENSTOCK_BENCH_{name}", usual)) for name, usual in names)
        return cls(rounds, os.environ.get("PENSTOCK_BENCH_MODEL", "9m"), rows, tokens, rank)

    def batch(self) -> list[np.ndarray]:
        draw = np.random.default_rng(0)
        return [draw.integers(2, SIZES[self.model].vocab, self.tokens + 1) for _ in range(self.rows)]


class ServiceSide:
    """Models of one session of a service."""

    def __init__(self, http: aiohttp.ClientSession, name: str) -> None:
        self._http, self._name = http, name
        self._numbers: dict[str, int] = {}

    async def open(self, models: int, rank: int) -> list[str]:
        session = (await self._post("create_session", {"tags": []}))["session_id"]
        adapters = []
        for number in range(models):
            body = {"session_id": session, "model_seq_id": number, "base_model": self._name}
            answer = await self._post("create_model", {**body, "lora_config": {"rank": rank, "seed": number}})
            await self._result(answer["request_id"])
            adapters.append(answer["model_id"])
        return adapters

    async def step(self, models: Sequence[str], rows: Sequence[np.ndarray]) -> float:
        """Seconds of a step of each model, on its share of the rows."""
        share = len(rows) // len(models)
        bodies = [
            _forward_body(model, self._next(model), rows[place * share : (place + 1) * share])
            for place, model in enumerate(models)
        ]
        steps = [{"model_id": model, "seq_id": self._next(model), "adam_params": ADAM} for model in models]
        began = time.monotonic()
        sent = [self._post("forward_backward", body) for body in bodies]
        answers = await asyncio.gather(*sent, *(self._post("optim_step", step) for step in steps))
        await asyncio.gather(*(self._result(answer["request_id"]) for answer in answers))
        return time.monotonic() - began

    async def samplers(self, models: Sequence[str]) -> list[str]:
        """A sampling session of each model as it is now."""
        sessions = []
        for place, model in enumerate(models):
            body = {"model_id": model, "seq_id": self._next(model), "sampling_session_seq_id": place}
            answer = await self._post("save_weights_for_sampler", body)
            sessions.append(json.loads(await self._result(answer["request_id"]))["sampling_session_id"])
        return sessions

    async def sample(self, samplers: Sequence[str], rows: Sequence[np.ndarray]) -> float:
        """Seconds of a sample after each row's beginning, from the samplers in turn."""
        began = time.monotonic()
        await asyncio.gather(*(self._sample(samplers[place % len(samplers)], ids) for place, ids in enumerate(rows)))
        return time.monotonic() - began

    async def _sample(self, sampler: str, ids: np.ndarray) -> None:
        prompt = {"chunks": [{"tokens": ids[:PROMPT].tolist()}]}
        body = {"prompt": prompt, "sampling_session_id": sampler, "seq_id": self._next(sampler)}
        answer = await self._post("asample", {**body, "sampling_params": {"max_tokens": SAMPLED, "stop": []}})
        await self._result(answer["request_id"])

    def _next(self, model: str) -> int:
        self._numbers[model] = self._numbers.get(model, 0) + 1
        return self._numbers[model]

    async def _post(self, path: str, body: Any) -> Any:
        sent: dict[str, Any] = {"json": body}
        if isinstance(body, bytes):
            sent = {"data": body, "headers": {"Content-Type": PROTOBUF}}
        async with self._http.post(f"/api/v1/{path}", **sent) as answer:
            answer.raise_for_status()
            return await answer.json()

    async def _result(self, request_id: str) -> bytes:
        """Raises `RuntimeError` for a request that failed."""
        async with asyncio.timeout(STEP_S):
            while True:
                async with self._http.post("/api/v1/retrieve_future", json={"request_id": request_id}) as answer:
                    body = await answer.read()
                    if answer.status == 408:
                        continue
                    if answer.status != 200 or b'"error"' in body[:10]:
                        raise RuntimeError(body[:500].decode(errors="replace"))
                    return body


def _forward_body(model: str, number: int, rows: Sequence[np.ndarray]) -> bytes:
    request = message_types()["ForwardBackwardRequest"](model_id=model, seq_id=number, loss_fn="cross_entropy")
    for ids in rows:
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = ids[:-1].astype("<i4").tobytes()
        tensor = datum.loss_fn_inputs["target_tokens"]
        tensor.dtype, tensor.dense = INT64, ids[1:].astype(DTYPES[INT64]).tobytes()
        tensor.shape.extend([len(ids) - 1])
    written: bytes = request.SerializeToString()
    return written


class DirectSide:
    """The same engine in this process. All in one thread of torch, as the trainer has it."""

    def __init__(self, model: str, extent: ServeExtent) -> None:
        from penstock.trainer import Ranks, TrainerConfig
        from penstock.trainer.service import ClientModels

        self._ranks = Ranks.open(START_S)
        config = TrainerConfig(dtype="float32", lora={"rank": extent.rank})
        self._models = ClientModels(model, config, self._ranks)
        self._models.create("direct", extent.rank, 0)

    def step(self, rows: Sequence[np.ndarray]) -> float:
        from penstock.trainer import AdamSettings
        from penstock.trainer.service import Datum, LossCall

        data = [Datum(ids[:-1].astype(np.int64), ids[1:].astype(np.int64), {}) for ids in rows]
        began = time.monotonic()
        self._models.forward("direct", data, LossCall("cross_entropy", {}), backward=True)
        self._models.step("direct", AdamSettings(**{"lr": ADAM["learning_rate"]}))
        return time.monotonic() - began

    def close(self) -> None:
        self._ranks.close()


@asynccontextmanager
async def service(model: str, extent: ServeExtent, folder: Path) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of `penstock serve` with one rollout server."""
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    (folder / "serve.yaml").write_text(f"name: serve\nmodel: {model}\nruns_dir: {folder}\n")
    settings = [f"trainer.lora.rank={extent.rank}", "trainer.dtype=float32", "rollout.engine=hf"]
    settings += [f"rollout.max_model_len={max(extent.tokens, PROMPT + SAMPLED)}"]
    words = ["serve", str(folder / "serve.yaml"), *settings, "--port", str(port), "--model-name", "bench"]
    command = [sys.executable, "-m", "penstock.deploy.cli", *words]
    key = "tml-" + "0" * 32
    environment = {**os.environ, "PENSTOCK_SERVICE_KEYS": f"bench={key}"}
    with (folder / "serve.log").open("wb") as log:
        process = subprocess.Popen(  # noqa: ASYNC220 - the benchmark does nothing else meanwhile
            command, env=environment, stdout=log, stderr=log
        )
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", headers={"X-API-Key": key}) as http:
            await _until_up(http, process, folder / "serve.log")
            yield http
    finally:
        stop_run(process)


async def _until_up(http: aiohttp.ClientSession, process: subprocess.Popen[bytes], log: Path) -> None:
    async with asyncio.timeout(START_S):
        while True:
            if process.poll() is not None:
                raise RuntimeError(f"penstock serve ended: {log.read_text()[-2000:]}")  # noqa: ASYNC240
            try:
                async with http.get("/api/v1/healthz") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                await asyncio.sleep(0.2)


async def _measure(extent: ServeExtent) -> dict[str, list[float]]:
    sides = ("direct", "service", f"service_of_{ADAPTERS}", "samples", f"samples_of_{ADAPTERS}")
    taken: dict[str, list[float]] = {side: [] for side in sides}
    rows = extent.batch()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-serve-") as name:
        folder = Path(name)
        model = folder / "model"
        save_model(SIZES[extent.model], model, "float32")
        trained_tokenizer().save_pretrained(model)
        async with service(str(model), extent, folder) as http:
            side = ServiceSide(http, "bench")
            one, eight = await side.open(1, extent.rank), await side.open(ADAPTERS, extent.rank)
            sampler, samplers = await side.samplers(one), await side.samplers(eight)
            from penstock.trainer import TorchThread

            in_torch = TorchThread(1)
            direct = await in_torch(DirectSide, str(model), extent)
            try:
                for number in range(-1, extent.rounds):  # the first is not counted
                    times = [
                        await in_torch(direct.step, rows),
                        await side.step(one, rows),
                        await side.step(eight, rows),
                        await side.sample(sampler, rows),
                        await side.sample(samplers, rows),
                    ]
                    say(f"round {number + 1}: {', '.join(f'{one:.3f} s' for one in times)}")
                    if number >= 0:
                        for samples, seconds in zip(taken.values(), times, strict=True):
                            samples.append(seconds)
            finally:
                await in_torch(direct.close)
                in_torch.close()
    return taken


def measure() -> dict[str, Any]:
    extent = ServeExtent.read()
    taken = asyncio.run(_measure(extent))
    seconds = {name: median(samples) for name, samples in taken.items()}

    def ratio(over: str, under: str) -> float:
        """The median over rounds, whose sides ran one after the other: the machine's load has changed little."""
        return round(median(one / other for one, other in zip(taken[over], taken[under], strict=True)), 3)

    return {
        "bench": "serve",
        "ratio": {
            "steps_over_direct": ratio("service", "direct"),
            "adapters_8_over_1": ratio(f"service_of_{ADAPTERS}", "service"),
            "samples_8_over_1": ratio(f"samples_of_{ADAPTERS}", "samples"),
        },
        "figures": {f"{name}_s": round(value, 4) for name, value in seconds.items()},
        "setup": {
            "model": extent.model,
            "rows": extent.rows,
            "tokens": extent.tokens,
            "rank": extent.rank,
            "rounds": extent.rounds,
            **processor(),
        },
    }
