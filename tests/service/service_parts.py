"""The service of this folder's tests, and a client that sends what Tinker's SDK sends."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import numpy as np

from penstock.common import HttpServer, cancel_and_wait, listen
from penstock.rollout_server import RolloutConfig
from penstock.service import ServiceContext, ServiceJob, parse_keys
from penstock.service.app import make_app
from penstock.service.config import Quota
from penstock.service.messages import DTYPES, FLOAT32, INT64, PROTOBUF, message_types
from penstock.service.worker import RequestRunner
from penstock.trainer import TrainerConfig
from penstock.transfer_queue import Limits, RedisTransferQueue, RunContext, TransferQueueConfig

PASSWORD = "a-test-password"
KEYS = {"alice": "tml-alice-0123456789abcdef", "bob": "tml-bob-0123456789abcdef"}
NAME = "Base/Model"
CONFIG = TrainerConfig(dtype="float32", checkpoint_every=3, lora={"rank": 8})
Answer = tuple[int, Any]


class Service:
    """`Service.trainer` runs until `kill_trainer`, which leaves it no time for anything."""

    def __init__(self, url: str, run: str, model: str, folder: Path) -> None:
        self._url, self._run, self._model, self.folder = url, run, model, folder
        self._stack = AsyncExitStack()
        self.log_bytes = 1 << 31
        self.quotas: dict[str, Quota] = {}
        self._trainer: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        config = TransferQueueConfig(registry_ttl_s=600.0)  # a test enters servers once
        self.queue = await RedisTransferQueue.connect(self._url, self._run, config, PASSWORD)
        self._stack.push_async_callback(self.queue.close)
        self._stack.push_async_callback(self.queue.drop_run)
        await self.queue.create_run(Limits(1, 1, 0), "")
        self.context = ServiceContext(self.queue.requests, self.folder, NAME, 256, "secret", hold_s=5.0)
        owners = parse_keys(",".join(f"{name}={key}" for name, key in KEYS.items()))
        server = HttpServer(make_app(self.context, owners), listen("127.0.0.1", 0))
        self.url = (await self._stack.enter_async_context(server)).url
        futures = asyncio.create_task(self.context.futures.run())
        self._stack.push_async_callback(cancel_and_wait, [futures])
        self._session = await self._stack.enter_async_context(aiohttp.ClientSession())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        await self.kill_trainer()
        await self._stack.aclose()

    def client(self, owner: str = "alice") -> Client:
        return Client(self._session, self.url, KEYS[owner])

    async def start_trainer(self, ranks: Any) -> None:
        from penstock.trainer import TorchThread
        from penstock.trainer.service import ClientModels

        run = RunContext(queue=self.queue, model=self._model, token=secrets.token_hex(16))
        job = ServiceJob(run, CONFIG, RolloutConfig(), self.folder, NAME, self.quotas, self.log_bytes)
        self._in_torch = TorchThread(1)
        models = await self._in_torch(ClientModels, self._model, CONFIG, ranks)
        self.runner = RequestRunner(job, models, self.queue.requests, self._in_torch)
        await self.runner.restore()
        self._trainer = asyncio.create_task(self.runner.run_log())

    async def restart_trainer(self, ranks: Any) -> None:
        """From the newest point, as a new process does."""
        await self.kill_trainer()
        await self.start_trainer(ranks)

    async def kill_trainer(self) -> None:
        if self._trainer is not None:
            await cancel_and_wait([self._trainer])
            await self._in_torch(lambda: None)  # what ran in the thread has ended
            self._in_torch.close()
            self._trainer = None


class Client:
    """One key."""

    def __init__(self, session: aiohttp.ClientSession, url: str, key: str) -> None:
        self._session, self._url, self._key = session, f"{url}/api/v1", key

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        sent = {"data": body} if isinstance(body, bytes) else {"json": body}
        headers = {"X-API-Key": self._key, **headers}
        async with self._session.request(method, f"{self._url}/{path}", headers=headers, **sent) as answer:
            is_json = answer.content_type == "application/json"
            return answer.status, await (answer.json() if is_json else answer.read())

    async def post(self, route: str, /, **body: Any) -> Any:
        status, answer = await self.call("POST", route, body)
        assert status == 200, answer
        return answer

    async def result(self, request_id: str) -> Any:
        """Return a mapping for JSON, `ForwardBackwardOutput` for protobuf."""
        status, answer = 408, None
        async with asyncio.timeout(300):
            while status == 408:
                status, answer = await self.call("POST", "retrieve_future", {"request_id": request_id})
        assert status == 200, answer
        return message_types()["ForwardBackwardOutput"].FromString(answer) if isinstance(answer, bytes) else answer

    async def model(self, rank: int = 4, **lora: Any) -> str:
        session = (await self.post("create_session", tags=[], sdk_version="0.38.0"))["session_id"]
        lora = {"rank": rank, "seed": 1, **lora}
        reply = await self.post("create_model", session_id=session, model_seq_id=0, base_model=NAME, lora_config=lora)
        return str((await self.result(reply["request_id"]))["model_id"])

    async def forward(self, model: str, number: int, **fields: Any) -> str:
        status, answer = await self.send_forward(forward_body(model, number, **fields))
        assert status == 200, answer
        return str(answer["request_id"])

    async def send_forward(self, body: bytes) -> Answer:
        return await self.call("POST", "forward_backward", body, **{"Content-Type": PROTOBUF})

    async def step(self, model: str, number: int, lr: float = 1e-2) -> str:
        answer = await self.post("optim_step", model_id=model, seq_id=number, adam_params={"learning_rate": lr})
        return str(answer["request_id"])


IDS = [3, 14, 15, 9, 26, 5]


def forward_body(
    model: str,
    number: int,
    *,
    ids: Sequence[int] = IDS,
    loss: str = "cross_entropy",
    options: Mapping[str, float] | None = None,
    only: bool = False,
    **inputs: Any,
) -> bytes:
    """A `ForwardBackwardRequest` of one datum."""
    request = message_types()["ForwardBackwardRequest"](
        model_id=model, seq_id=number, loss_fn=loss, loss_fn_config=options or {}, forward_only=only
    )
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(ids[:-1], "<i4").tobytes()
    for name, values in {"target_tokens": np.array(ids[1:]), **inputs}.items():
        array = np.asarray(values)
        dtype = INT64 if array.dtype.kind == "i" else FLOAT32
        tensor = datum.loss_fn_inputs[name]
        tensor.dtype, tensor.dense = dtype, array.astype(DTYPES[dtype]).tobytes()
        tensor.shape.extend(array.shape)
    written: bytes = request.SerializeToString()
    return written


def logprobs_of(output: Any) -> np.ndarray:
    return np.frombuffer(output.loss_fn_outputs[0].fields["logprobs"].data, "<f4")
