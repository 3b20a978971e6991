"""The trainer of a service: it runs the log of requests, one after the other, and writes each one's result.

    newest point ─► requests after it, again, without new results ─► further ones ─► a point every few steps

A request that was acknowledged is in the log, and stays there until a point holds what it changed. So each is applied
once, whatever is killed: what a point holds is not run again, what it lacks is. A result, once written, stays.
"""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.common import Backoff, cancel_and_wait
from penstock.service.calls import (
    CheckpointPath,
    CheckpointRecord,
    CreateModel,
    LoadWeights,
    LoraSettings,
    OptimStep,
    PathKind,
    RunRecord,
    SamplerRecord,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
    SessionRecord,
    checkpoint_folder,
    folder_name,
)
from penstock.service.job import JSON, ServiceJob, failed, outcome_of, succeeded
from penstock.service.messages import PROTOBUF, BadMessage, read_forward, write_forward
from penstock.service.quotas import Quotas
from penstock.service.sampler import SampleRunner
from penstock.trainer import AdamSettings, BadJob, NotSaved
from penstock.trainer.service import BadRequestData
from penstock.transfer_queue import ClientRequest, ClientUsage, LogForgotten, Record, RequestLog, RequestResult

if TYPE_CHECKING:
    from penstock.trainer import TorchThread
    from penstock.trainer.service import ClientModels

IDLE_S = 0.02
"""Between two looks into an empty log."""
READ_AHEAD = 4
"""Number of requests that are put in order ahead of time. A key's first request waits for at most this many requests of
other keys."""
SWEEP_S = 60.0
"""Between two looks for what is over."""
REMOVE_S = 10.0
"""Seconds between the end of a session and the removal of its models and samplers: calls that the API has just taken
have come to the log by then."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of running a request."""

    result: RequestResult
    records: tuple[Record, ...] = ()
    is_point_due: bool = False
    used: ClientUsage | None = None

    def note(self, request_id: str) -> dict[str, Any]:
        """JSON of what is to be written of the request, whose result is JSON."""
        records = [asdict(one) for one in self.records]
        return {"request": request_id, "result": self.result.data.decode(), "records": records}

    @classmethod
    def from_note(cls, note: Mapping[str, Any]) -> Outcome:
        records = tuple(Record(**one) for one in note["records"])
        return cls(RequestResult(JSON, note["result"].encode()), records)


class RequestRunner:
    """Runs the log. The models are touched in the torch thread alone."""

    def __init__(self, job: ServiceJob, models: ClientModels, requests: RequestLog, in_torch: TorchThread) -> None:
        self._job, self._models, self._requests, self._in_torch = job, models, requests, in_torch
        self._metrics, self._quotas = job.metrics, Quotas(requests, job.quotas)
        self._metrics.adapters.set_function(lambda: len(models.names))
        self._position = 0
        """Requests of the log that are in the models."""
        self._steps: Counter[str] = Counter()
        """Optimizer steps of each model since the newest point."""
        self._log_bytes = 0
        """Bytes of the requests since the newest point, about."""
        self._is_stopping = False
        self._kinds: Mapping[str, Callable[[ClientRequest, str], Awaitable[Outcome]]] = {
            "create_model": self._create,
            "create_from_weights": self._load,
            "load_weights": self._load,
            "forward": self._forward,
            "optim_step": self._step,
            "save_weights": partial(self._save, SaveWeights, "weights"),
            "save_weights_for_sampler": partial(self._save, SaveForSampler, "sampler_weights"),
            "save_weights_external": partial(self._save, SaveExternal, "external_weights"),
        }

    @property
    def _points(self) -> Path:
        return self._job.folder / "points"

    async def run(self) -> None:
        """Until it is cancelled; then the request under way ends, and what is in the models is made durable. Raises
        `LogForgotten`, `QueueUnavailable`."""
        await self.restore()
        running = asyncio.ensure_future(self.run_log())
        try:
            # Not cancelled itself: what a request changes and its number in the log belong together.
            await asyncio.shield(running)
        except asyncio.CancelledError:
            self._is_stopping = True
            await running
            await self._write_point()
            await self._requests.trim(self._position)
            raise

    async def restore(self) -> None:
        """Load the newest point."""
        self._position, note = await self._in_torch(self._models.read_point, self._points)
        if note is not None:  # it was killed after the point and before the result
            await self._finish(note["request"], Outcome.from_note(note))
        logger.info("the service's models are those after request %d", self._position)

    async def run_log(self) -> None:
        """Run what comes after the point, until `run` is cancelled."""
        swept = 0.0
        while not self._is_stopping:
            ids = await self._requests.read(self._position, READ_AHEAD)
            for request_id in ids:
                await self._run(request_id)
                if self._is_stopping:
                    return
            if not ids:
                await asyncio.sleep(IDLE_S)
            if time.monotonic() - swept > SWEEP_S:
                swept = time.monotonic()
                await self._sweep()

    async def _run(self, request_id: str) -> None:
        request = await self._requests.request(request_id)
        if request is None:
            raise LogForgotten(f"request {request_id} of the log is not there any more")
        before = await self._requests.result(request_id)
        if before is None:
            began = self._metrics.started(request)
            outcome = await self._settled(request, request_id)
            self._metrics.ended(request, outcome_of(outcome.result), began)
        else:
            outcome = await self._repeated(request, request_id, before)
        self._position += 1
        self._log_bytes += len(request.body) + 512  # its other fields
        if outcome.is_point_due:
            # Before its result: what a checkpoint held may be removed as soon as a client sees that it is loaded.
            await self._write_point(outcome.note(request_id))
        await self._finish(request_id, outcome)
        if not outcome.is_point_due:
            has_steps = self._steps[_model_of(request)] >= self._job.config.checkpoint_every
            if not has_steps and self._log_bytes <= self._job.log_bytes:  # clients send bytes without any step, too
                return
            await self._write_point()
        await self._requests.trim(self._position)

    async def _settled(self, request: ClientRequest, request_id: str) -> Outcome:
        """The outcome, also of a request that fails."""
        try:
            await self._quotas.check(request.owner, request.kind, await self._models_of(request))
            return await self._kinds[request.kind](request, request_id)
        except (BadRequestData, BadMessage) as error:
            return Outcome(failed(str(error)))
        except OSError as error:
            logger.exception("request %s", request_id)
            return Outcome(failed(f"the server's disk: {error.strerror or type(error).__name__}", "server"))
        except NotSaved:
            logger.exception("request %s", request_id)
            return Outcome(failed("nothing is saved: the server's disk is full", "server"))
        except Exception as error:
            if request.kind != "forward":  # what it has changed is not known: the newest point is
                raise
            logger.exception("request %s", request_id)
            await self._in_torch(self._models.drop_gradients, _model_of(request))
            message = f"{type(error).__name__} in the forward or backward: the gradients since optim_step are dropped"
            return Outcome(failed(message, "server"))

    async def _repeated(self, request: ClientRequest, request_id: str, before: RequestResult) -> Outcome:
        """Change again what the request has changed after the newest point. Its result is there already."""
        if (outcome := outcome_of(before)) != "done":
            if request.kind == "forward" and outcome == "server":
                await self._in_torch(self._models.drop_gradients, _model_of(request))
        elif not request.kind.startswith("save"):
            await self._kinds[request.kind](request, request_id)
        return Outcome(before)

    async def _finish(self, request_id: str, outcome: Outcome) -> None:
        await self._requests.finish(request_id, outcome.result, outcome.records, outcome.used)

    async def _write_point(self, note: Mapping[str, Any] | None = None) -> None:
        """Waits while the disk is full, unless the service stops: restarts would run the requests in vain.

        Raises `NotSaved`, `OSError`.
        """
        pauses = Backoff(0.5, 30.0).pauses()
        while True:
            try:
                await self._in_torch(self._models.write_point, self._points, self._position, note)
                break
            except (NotSaved, OSError) as error:
                if self._is_stopping:
                    raise
                logger.error("requests wait until a point is written in %s: %s", self._points, error)
                await pauses.sleep()
        self._steps.clear()
        self._log_bytes = 0

    # kinds ---------------------------------------------------------------------------------------------------------
    async def _create(self, request: ClientRequest, request_id: str) -> Outcome:
        call, model_id = CreateModel.model_validate_json(request.body), _model_of(request)
        lora, seed = call.lora_config, call.lora_config.seed
        seed = int(request_id[:8], 16) if seed is None else seed
        await self._in_torch(
            partial(self._models.create, attention=lora.train_attn, mlp=lora.train_mlp), model_id, lora.rank, seed
        )
        return self._made(request, call.session_id, lora, call.user_metadata, succeeded(model_id=model_id))

    def _made(
        self, request: ClientRequest, session_id: str, lora: LoraSettings, metadata: Any, result: RequestResult
    ) -> Outcome:
        record = RunRecord(
            owner=request.owner,
            session_id=session_id,
            base_model=self._job.model_name,
            rank=lora.rank,
            created=time.time(),
            lora=lora,
            user_metadata=metadata,
        )
        return Outcome(result, (record.record(_model_of(request)),), is_point_due=True)

    async def _load(self, request: ClientRequest, request_id: str) -> Outcome:
        call, model_id = LoadWeights.model_validate_json(request.body), _model_of(request)
        saved = await self._checkpoint(call.path, request.owner)
        if saved is None:
            raise BadRequestData(f"path {call.path[:200]}: there is no such checkpoint of this key")
        if saved.kind != "weights":
            raise BadRequestData(f"path {call.path}: of {saved.kind} only samplers are made; save_state has `weights`")
        folder = checkpoint_folder(self._job.folder, saved.path)
        await self._in_torch(partial(self._models.load, with_optimizer=call.optimizer), model_id, folder)
        result = succeeded(path=call.path, model_id=model_id, type="load_weights")
        if call.session_id is None:
            return Outcome(result, is_point_due=True)
        return self._made(request, call.session_id, saved.lora, call.user_metadata, result)

    async def _forward(self, request: ClientRequest, request_id: str) -> Outcome:
        call = await asyncio.to_thread(read_forward, request.body)
        forward = partial(self._models.forward, backward=not call.forward_only)
        result = await self._in_torch(forward, call.model_id, call.data, call.loss)
        tokens = sum(len(datum.ids) for datum in call.data)
        self._metrics.tokens.labels(request.owner, "scored" if call.forward_only else "trained").inc(tokens)
        return Outcome(RequestResult(PROTOBUF, write_forward(result)), used=ClientUsage(tokens=tokens))

    async def _step(self, request: ClientRequest, request_id: str) -> Outcome:
        call = OptimStep.model_validate_json(request.body)
        adam = call.adam_params
        betas = (adam.beta1, adam.beta2)
        settings = AdamSettings(adam.learning_rate, betas, adam.eps, adam.weight_decay, adam.grad_clip_norm)
        metrics = await self._in_torch(self._models.step, call.model_id, settings)
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}  # JSON has no other numbers
        self._steps[call.model_id] += 1
        return Outcome(succeeded(metrics=metrics, type="optim_step"), used=ClientUsage(steps=1))

    async def _save(self, body: type[Any], kind: PathKind, request: ClientRequest, request_id: str) -> Outcome:
        call = body.model_validate_json(request.body)
        if kind == "sampler_weights" and call.path is None:
            return await self._save_sampler(call, request)
        name = call.path or f"seq-{call.seq_id:06d}"
        path = CheckpointPath(run_id=call.model_id, kind=kind, name=name)
        overwrite = kind == "sampler_weights" or getattr(call, "overwrite", False)
        if not overwrite and await self._checkpoint(str(path), request.owner) is not None:
            raise BadRequestData(f"{path} is there already; overwrite=True replaces it")
        run = await self._run_record(call.model_id)
        save = partial(self._models.save, with_optimizer=kind == "weights")
        written = await self._in_torch(save, call.model_id, checkpoint_folder(self._job.folder, path))
        now, ttl_s = time.time(), call.ttl_seconds
        record = CheckpointRecord(
            owner=request.owner,
            run_id=call.model_id,
            kind=kind,
            name=name,
            bytes=written,
            created=now,
            lora=run.lora.model_copy(update={"rank": run.rank}),
            base_model=run.base_model,
            expires=None if ttl_s is None else now + ttl_s,
            user_metadata=getattr(call, "user_metadata", None),
        )
        return Outcome(succeeded(path=str(path)), (record.record(str(path)),))

    async def _save_sampler(self, call: SaveForSampler, request: ClientRequest) -> Outcome:
        """A sampling session of the weights as they are now, without a checkpoint."""
        run = await self._run_record(call.model_id)
        if call.sampling_session_seq_id is None:
            raise BadRequestData("path or sampling_session_seq_id is needed")
        sampler_id = f"{run.session_id}:sample:{call.sampling_session_seq_id}"
        folder = Path("samplers") / folder_name(sampler_id)
        save = partial(self._models.save, with_optimizer=False)
        await self._in_torch(save, call.model_id, self._job.folder / folder)
        record = SamplerRecord(
            owner=request.owner, session_id=run.session_id, base_model=run.base_model, folder=str(folder)
        )
        return Outcome(succeeded(sampling_session_id=sampler_id), (record.record(sampler_id),))

    # records -------------------------------------------------------------------------------------------------------
    async def _checkpoint(self, path: str, owner: str) -> CheckpointRecord | None:
        record = await CheckpointRecord.read(self._requests, path)
        return record if record is not None and record.owner == owner else None

    async def _models_of(self, request: ClientRequest) -> int:
        """Models in memory of the request's owner, where it makes a further one."""
        if not request.kind.startswith("create"):
            return 0
        runs = await RunRecord.read_all(self._requests)
        return sum(name in runs and runs[name].owner == request.owner for name in self._models.names)

    async def _run_record(self, model_id: str) -> RunRecord:
        run = await RunRecord.read(self._requests, model_id)
        if run is None:
            raise BadRequestData(f"model {model_id} is not here any more")
        return run

    async def _sweep(self) -> None:
        """Remove checkpoints whose time is over, and models and samplers of sessions that are over."""
        now, sessions = time.time(), await SessionRecord.read_all(self._requests)
        ended = {name for name, one in sessions.items() if one.is_over(now - REMOVE_S)}
        over = [name for name in self._models.names if name.partition(":")[0] in ended]
        for model_id in over:
            await self._in_torch(self._models.remove, model_id)
            await self._requests.end_waiting(f"model:{model_id}", failed("the session has ended"))
        if over:
            await self._write_point()
            await self._requests.trim(self._position)
        for name, sampler in (await SamplerRecord.read_all(self._requests)).items():
            if sampler.session_id in ended:
                await SamplerRecord.remove(self._requests, name)
                if sampler.folder is not None and sampler.folder.startswith("samplers/"):
                    await asyncio.to_thread(shutil.rmtree, self._job.folder / sampler.folder, ignore_errors=True)
        for path, record in (await CheckpointRecord.read_all(self._requests)).items():
            if record.expires is not None and record.expires < now:
                await CheckpointRecord.remove(self._requests, path)
                folder = checkpoint_folder(self._job.folder, record.path)
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def _model_of(request: ClientRequest) -> str:
    return request.index.removeprefix("model:")


async def run_service(job: ServiceJob) -> None:
    """The trainer's process of a service, until it is cancelled. Raises `BadJob`, `LogForgotten`."""
    from penstock.trainer import Ranks, TorchThread, threads_here
    from penstock.trainer.service import ClientModels
    from penstock.transfer_queue import RedisTransferQueue

    if not isinstance(job.run.queue, RedisTransferQueue):
        raise BadJob("a service's requests are in Redis: set transfer_queue.url, or leave it out")
    in_torch, requests = TorchThread(threads_here(job.config)), job.run.queue.requests
    ranks = await in_torch(Ranks.open, job.config.collective_timeout_s)
    try:
        models = await in_torch(ClientModels, job.run.model, job.config, ranks)
        async with SampleRunner(job, models, requests, in_torch) as sampler:
            tasks = [
                asyncio.create_task(RequestRunner(job, models, requests, in_torch).run(), name="requests"),
                asyncio.create_task(sampler.run(), name="samples"),
            ]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                await cancel_and_wait(tasks)
    finally:
        await in_torch(ranks.close)
        in_torch.close()
