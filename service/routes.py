"""Routes that submit requests, and the one where their results are fetched.

    POST forward_backward, optim_step, …  ─► checked ─► log in Redis, acknowledged ─► {"request_id"}
    POST retrieve_future ─► held until the trainer has written the result, 30 s at most (408: ask again)

What is refused here has no place in a model's order: the client's next call is refused as well, by its number. So this
process refuses what it can see without a model; what the model or another checkpoint decides is the request's result.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from numpy.typing import NDArray
from pydantic import BaseModel

from penstock.common import HttpError
from penstock.service.calls import (
    CheckpointPath,
    CheckpointRecord,
    CreateModel,
    LoadWeights,
    OptimStep,
    Owned,
    RunRecord,
    Sample,
    SamplerRecord,
    SamplingSession,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
    SessionRecord,
    checkpoint_folder,
)
from penstock.service.messages import PROTOBUF, BadMessage, ForwardCall, read_forward
from penstock.service.metrics import ApiMetrics
from penstock.trainer.service import LOSSES
from penstock.transfer_queue import ClientRequest, QueueUnavailable, RequestLog

T = TypeVar("T", bound=Owned)
HOLD_S = 30.0
"""A poll is held for so long; the client gives up after 45 s, and asks again at once."""
MOST_WAITING, MOST_OF_KEY = 512, 4096
"""Requests without a result: of one model or sampling session, and of one key."""
RETRY_S = 2.0
POLL_S = 0.02
logger = logging.getLogger(__name__)


class Futures:
    """Waiting for results: one look at Redis for all requests that are waited for. `run` in a task of its own."""

    def __init__(self, requests: RequestLog) -> None:
        self._requests = requests
        self._awaited: Counter[str] = Counter()
        self._looked = asyncio.Condition()
        self._done: set[str] = set()

    async def wait(self, request_id: str, timeout_s: float) -> None:
        """Returns when the request has a result, or after `timeout_s`."""
        self._awaited[request_id] += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s), self._looked:
                    await self._looked.wait_for(lambda: request_id in self._done)
        finally:
            self._awaited[request_id] -= 1
            if not self._awaited[request_id]:
                del self._awaited[request_id]
                self._done.discard(request_id)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            if not self._awaited:
                continue
            try:
                done = await self._requests.done(list(self._awaited))
            except QueueUnavailable as error:
                logger.warning("results are waited for: %s", error)
                continue
            if done:
                async with self._looked:
                    self._done |= done & self._awaited.keys()
                    self._looked.notify_all()


@dataclass(frozen=True, slots=True)
class ServiceContext:
    """The surroundings of the routes."""

    requests: RequestLog
    folder: Path
    """Checkpoints lie below it."""
    model_name: str
    """The base model as clients call it."""
    context_length: int
    secret: str
    """Signs downloads."""
    owner_bytes: int = 1 << 30
    """Bytes of an owner's requests without a result, and of results that were not fetched, at most."""
    hold_s: float = HOLD_S
    metrics: ApiMetrics = field(default_factory=ApiMetrics)
    futures: Futures = field(init=False)
    one_session_change: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        object.__setattr__(self, "futures", Futures(self.requests))

    async def record(self, kind: type[T], name: str, http: Request) -> T:
        """Raises `HttpError` 404, also for a record of another owner: that it exists is theirs to know."""
        record = await kind.read(self.requests, name)
        if record is None or record.owner != owner_of(http):
            raise HttpError(404, kind.KIND, f"{kind.KIND} {name[:200]}: there is none of this key")
        return record

    async def session(self, name: str, http: Request) -> SessionRecord:
        """Raises `HttpError` 404; 410 for one that is over: what comes for its models is never run."""
        record = await self.record(SessionRecord, name, http)
        if record.is_over(time.time()):
            raise HttpError(410, "session_id", "the session has ended")
        return record

    async def run(self, model_id: str, http: Request) -> RunRecord:
        """The model of a session that is not over. Raises `HttpError`."""
        run = await self.record(RunRecord, model_id, http)
        await self.session(run.session_id, http)
        return run

    async def records(self, kind: type[T], http: Request) -> dict[str, T]:
        """Return the records of the caller's key by name."""
        everything, owner = await kind.read_all(self.requests), owner_of(http)
        return {name: one for name, one in everything.items() if one.owner == owner}

    def check_model(self, name: str) -> None:
        if name != self.model_name:
            raise HttpError(422, "base_model", f"{name[:200]}: this server has {self.model_name}")


async def submit(context: ServiceContext, request: ClientRequest) -> str:
    """The id of the request, or of the one before that it repeats. Raises `HttpError`."""
    size, most = len(request.body) + request.result_bytes, context.owner_bytes // (1 if request.ordered else 2)
    if size > most:
        message = f"request and result have up to {size} bytes, and those of one key at most {most}"
        raise HttpError(413, "", f"{message} (transfer_queue.max_bytes)")
    how, request_id = await context.requests.submit(request, MOST_WAITING, MOST_OF_KEY, context.owner_bytes)
    waiting = {
        "full": f"{MOST_WAITING} requests of {request.index} have no result yet",
        "quota": f"{MOST_OF_KEY} requests of this key have no result yet",
        "bytes": f"requests of this key without a result, and results that were not fetched, have "
        f"{context.owner_bytes // 2} bytes (transfer_queue.max_bytes)",
    }
    if how in waiting:
        context.metrics.refusals.labels(how).inc()
        raise HttpError(429, "seq_id", waiting[how], retry_after_s=RETRY_S)
    if how in ("other", "old"):
        why = "is another request's" if how == "other" else "is done, and its result is no longer kept"
        raise HttpError(422, "seq_id", f"number {request.number} of {request.index} {why}")
    return request_id


def make_router(context: ServiceContext) -> APIRouter:
    router = APIRouter(prefix="/api/v1")
    _add_models(router, context)
    _add_training(router, context)
    _add_sampling(router, context)
    _add_futures(router, context)
    return router


def owner_of(http: Request) -> str:
    owner: str = http.state.owner
    return owner


def model_index(model_id: str) -> str:
    return f"model:{model_id}"


def _add_models(router: APIRouter, context: ServiceContext) -> None:
    @router.post("/create_session")
    async def create_session(body: dict[str, Any], http: Request) -> dict[str, Any]:
        session_id = secrets.token_hex(12)
        metadata = body.get("user_metadata")
        metadata, now = metadata if isinstance(metadata, dict) else None, time.time()
        record = SessionRecord(owner=owner_of(http), created=now, seen=now, user_metadata=metadata)
        await context.requests.put(record.record(session_id))
        warning = "train_unembed changes nothing here: the head has no adapter on this server"
        return {"type": "create_session", "session_id": session_id, "warning_message": warning}

    @router.post("/create_model")
    async def create_model(body: CreateModel, http: Request) -> dict[str, str]:
        """A future; its model is ``SESSION:train:NUMBER``."""
        context.check_model(body.base_model)
        await context.session(body.session_id, http)
        model_id = f"{body.session_id}:train:{body.model_seq_id}"
        return await _submitted(context, http, "create_model", body, model_id=model_id, seq_id=0)

    @router.post("/load_weights")
    async def load_weights(body: LoadWeights, http: Request) -> dict[str, str]:
        """A checkpoint into a model, or as a new one, whose first request this is."""
        if CheckpointPath.parse(body.path) is None:
            raise HttpError(422, "path", "is no tinker://RUN/weights/NAME")
        if body.model_id is not None and body.seq_id is not None:
            await context.run(body.model_id, http)
            return await _submitted(context, http, "load_weights", body, model_id=body.model_id, seq_id=body.seq_id)
        if body.session_id is None or body.model_seq_id is None:
            raise HttpError(422, "model_id", "model_id and seq_id, or session_id and model_seq_id, are needed")
        await context.session(body.session_id, http)
        model_id = f"{body.session_id}:train:{body.model_seq_id}"
        return await _submitted(context, http, "create_from_weights", body, model_id=model_id, seq_id=0)

    @router.post("/get_info")
    async def get_info(body: dict[str, Any], http: Request) -> dict[str, Any]:
        model_id = str(body.get("model_id"))
        run = await context.record(RunRecord, model_id, http)
        name = {"model_name": run.base_model, "arch": "", "tokenizer_id": run.base_model}
        return {"type": "get_info", "model_data": name, "model_id": model_id, "is_lora": True, "lora_rank": run.rank}


def _add_training(router: APIRouter, context: ServiceContext) -> None:
    @router.post("/forward_backward")
    async def forward_backward(http: Request) -> dict[str, str]:
        """Protobuf `ForwardBackwardRequest`, with ``forward_only`` for logprobs and loss alone."""
        if PROTOBUF not in http.headers.get("content-type", ""):
            raise HttpError(415, "content-type", f"must be {PROTOBUF}, as tinker 0.38 sends it: update the SDK")
        if http.headers.get("content-encoding", "identity") != "identity":
            raise HttpError(415, "content-encoding", "compressed bodies are not taken, and client/config says so")
        body = await http.body()
        try:
            call = read_forward(body)
        except BadMessage as error:
            raise HttpError(422, "data", str(error)) from error
        if call.loss.name not in LOSSES:
            raise HttpError(422, "loss_fn", call.loss.refusal)
        if call.number < 1:
            raise HttpError(422, "seq_id", "must be 1 or more")
        await context.run(call.model_id, http)
        index, number = model_index(call.model_id), call.number + 1
        request = ClientRequest(owner_of(http), "forward", body, index, number, digest=_digest(call))
        return {"request_id": await submit(context, request), "model_id": call.model_id}

    for path, model in (
        ("optim_step", OptimStep),
        ("save_weights", SaveWeights),
        ("save_weights_for_sampler", SaveForSampler),
        ("save_weights_external", SaveExternal),
    ):
        router.post(f"/{path}", name=path)(_of_model(context, path, model))


def _of_model(context: ServiceContext, kind: str, model: type[BaseModel]) -> Callable[..., Any]:
    async def route(body: Any, http: Request) -> dict[str, str]:
        await context.run(body.model_id, http)
        return await _submitted(context, http, kind, body, model_id=body.model_id, seq_id=body.seq_id)

    route.__annotations__ = {"body": model, "http": Request, "return": dict[str, str]}
    return route


async def _submitted(
    context: ServiceContext, http: Request, kind: str, body: BaseModel, *, model_id: str, seq_id: int
) -> dict[str, str]:
    """`seq_id`: 0 for what makes the model. The log's numbers begin with 1."""
    data = body.model_dump_json().encode()
    request = ClientRequest(owner_of(http), kind, data, model_index(model_id), seq_id + 1)
    return {"request_id": await submit(context, request), "model_id": model_id}


def _digest(call: ForwardCall) -> str:
    """Return a digest of the message's content: protobuf writes a map in any order."""
    digest = hashlib.sha256(json.dumps([call.forward_only, call.loss.name, sorted(call.loss.options.items())]).encode())
    for datum in call.data:
        arrays: list[tuple[str, NDArray[Any]]] = [("", datum.ids), ("target_tokens", datum.targets)]
        for name, array in [*arrays, *sorted(datum.inputs.items())]:
            digest.update(f"{name}{array.shape}{array.dtype}".encode() + array.tobytes())
    return digest.hexdigest()[:32]


def _add_sampling(router: APIRouter, context: ServiceContext) -> None:
    @router.post("/create_sampling_session")
    async def create_sampling_session(body: SamplingSession, http: Request) -> dict[str, str]:
        """Weights that stay as they are for this session: the base model's, or those of a checkpoint."""
        owner = owner_of(http)
        await context.session(body.session_id, http)
        folder = saved = None
        if body.model_path is not None:
            path = CheckpointPath.parse(body.model_path)
            if path is None or path.kind != "sampler_weights":
                raise HttpError(422, "model_path", "is no tinker://RUN/sampler_weights/NAME")
            saved = (await context.record(CheckpointRecord, str(path), http)).created
            folder = str(checkpoint_folder(Path(), path))
        elif body.base_model is not None:
            context.check_model(body.base_model)
        sampler_id = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
        record = SamplerRecord(
            owner=owner,
            session_id=body.session_id,
            base_model=context.model_name,
            model_path=body.model_path,
            folder=folder,
            saved=saved,
        )
        await context.requests.put(record.record(sampler_id))
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    @router.get("/samplers/{sampler_id:path}")
    async def get_sampler(sampler_id: str, http: Request) -> dict[str, Any]:
        sampler = await context.record(SamplerRecord, sampler_id, http)
        return {"sampler_id": sampler_id, "base_model": sampler.base_model, "model_path": sampler.model_path}

    @router.post("/asample")
    async def asample(body: Sample, http: Request) -> dict[str, Any]:
        """A future of `num_samples` sequences."""
        await context.record(SamplerRecord, body.sampling_session_id, http)
        data, index = body.model_dump_json().encode(), f"sampler:{body.sampling_session_id}"
        room = max(0, context.context_length - len(body.prompt.ids))
        tokens = body.num_samples * min(body.sampling_params.max_tokens or room, room)
        result_bytes = 8 * tokens + 4 * len(body.prompt.ids)  # an id and a logprob each, and the prompt's logprobs
        request = ClientRequest(
            owner_of(http), "sample", data, index, body.seq_id, ordered=False, result_bytes=result_bytes
        )
        request_id = await submit(context, request)
        return {
            "request_id": request_id,
            "sample_sequence_ids": [f"{request_id}-{number}" for number in range(body.num_samples)],
        }


def _add_futures(router: APIRouter, context: ServiceContext) -> None:
    @router.post("/retrieve_future")
    async def retrieve_future(body: dict[str, Any], http: Request) -> Response:
        """The result, when it is there; 408 after 30 s without."""
        request_id = str(body.get("request_id"))
        owner = await context.requests.owner(request_id)
        if owner != owner_of(http):
            # 410 makes the client submit a sample anew; what another key asked for is none of this one's.
            raise HttpError(404, "request_id", "there is no such request of this key")
        result = await context.requests.result(request_id)
        if result is None:
            await context.futures.wait(request_id, context.hold_s)
            result = await context.requests.result(request_id)
        if result is None:
            return Response('{"queue_state":"active"}', 408, media_type="application/json")
        await context.requests.fetched(request_id)
        return Response(result.data, media_type=result.content)
