"""Samples of a service: on the run's rollout servers, which have several adapters at once.

    open samples ─► a place is free, the owner with the fewest first ─► its adapter as a folder for the servers ─►
    one request per sequence, which names the folder by its content ─► result

A checkpoint that is saved again under its name is another folder.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from penstock.common import cancel_and_wait, gather_or_cancel
from penstock.rollout_server import (
    AdapterRef,
    BadRequest,
    EngineError,
    GenerateRequest,
    RolloutClient,
    Sampling,
    find_model,
)
from penstock.service.calls import CheckpointRecord, Sample, SamplerRecord
from penstock.service.job import ServiceJob, failed, outcome_of
from penstock.service.messages import PROTOBUF, SampledTokens, write_sample
from penstock.service.quotas import Quotas
from penstock.trainer.service import BadRequestData
from penstock.transfer_queue import ClientRequest, ClientUsage, QueueUnavailable, RequestLog, RequestResult

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType

    from penstock.trainer import TorchThread
    from penstock.trainer.service import ClientModels

POLL_S = 0.03
SERVED = 64
"""Adapters that stay in folders for the servers."""
logger = logging.getLogger(__name__)
Waiting = tuple[str, ClientRequest, Sample]
"""A request by its id, and its call."""


@dataclass(slots=True)
class _Served:
    """A checkpoint as the servers read it."""

    ref: AdapterRef
    stamp: tuple[int, int] | None
    """State of the checkpoint's file when it was read."""
    users: int = 0
    """Samples in flight."""


class SampleRunner:
    """Used as a context; `run` in a task of its own."""

    def __init__(self, job: ServiceJob, models: ClientModels, requests: RequestLog, in_torch: TorchThread) -> None:
        from transformers import AutoTokenizer

        self._job, self._models, self._requests, self._in_torch = job, models, requests, in_torch
        self._client = RolloutClient(job.run.queue, job.run.token, job.rollout.request_timeout_s)
        self._tokenizer = AutoTokenizer.from_pretrained(find_model(job.run.model))
        self._folder, self._quotas = job.folder / "served", Quotas(requests, job.quotas)
        self._served: OrderedDict[str, _Served] = OrderedDict()
        """Adapters by folder of the checkpoint; the one that was sampled from longest ago is first."""
        self._one_written_at_a_time = asyncio.Lock()
        self._waiting: list[Waiting] = []
        self._known: set[str] = set()
        self._tasks: dict[asyncio.Task[None], str] = {}
        """The owner of each sample in flight."""

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)  # of a runner that was killed
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        await cancel_and_wait(self._tasks)
        await self._client.close()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self._look()
                self._start()
            except QueueUnavailable as error:
                logger.warning("samples wait: %s", error)

    async def _look(self) -> None:
        """Find new requests."""
        open_ids = await self._requests.open_requests()
        self._known &= set(open_ids)
        for request_id in (one for one in open_ids if one not in self._known):
            request = await self._requests.request(request_id)
            if request is None or request.kind != "sample":
                continue
            self._waiting.append((request_id, request, Sample.model_validate_json(request.body)))
            self._known.add(request_id)

    def _start(self) -> None:
        """Begin as many samples as the servers have places."""
        most = self._job.rollout.max_concurrent * max(1, self._job.rollout.servers)
        waiting, room = in_turns(self._waiting, self._tasks.values()), max(0, most - len(self._tasks))
        self._waiting = waiting[room:]
        for request_id, request, call in waiting[:room]:
            task = asyncio.create_task(self._answer(request_id, request, call), name=request_id)
            self._tasks[task] = request.owner
            task.add_done_callback(self._tasks.pop)

    # adapters ------------------------------------------------------------------------------------------------------
    async def _checkpoint(self, call: Sample) -> str | None:
        """Folder of the checkpoint to sample from; None: the base model. Raises `BadRequestData` where its weights are
        not those of the sampling session any more."""
        sampler = await SamplerRecord.read(self._requests, call.sampling_session_id)
        if sampler is None:
            raise BadRequestData(f"sampler {call.sampling_session_id} is not here any more")
        if sampler.saved is not None and sampler.model_path is not None:
            checkpoint = await CheckpointRecord.read(self._requests, sampler.model_path)
            if checkpoint is not None and checkpoint.created != sampler.saved:
                raise BadRequestData(
                    f"{sampler.model_path} was saved again after this session began: create another sampling session "
                    "for it"
                )
        return sampler.folder

    @asynccontextmanager
    async def _adapter(self, folder: str | None) -> AsyncIterator[AdapterRef | None]:
        """The adapter of a checkpoint, whose folder stays until the end of the context. Raises `BadRequestData`,
        `OSError` for one that cannot be read."""
        if folder is None:
            yield None
            return
        async with self._one_written_at_a_time:
            served = await self._written(folder)
            served.users += 1
        try:
            yield served.ref
        finally:
            served.users -= 1

    async def _written(self, folder: str) -> _Served:
        stamp, known = self._stamp(folder), self._served.get(folder)
        if known is None or stamp not in (None, known.stamp):  # of a deleted one what is there stays
            written = await asyncio.to_thread(self._models.write_served, self._job.folder / folder, self._folder)
            ref = AdapterRef(sha256=written.sha256, folder=str(written.path.resolve()))
            known = self._served[folder] = _Served(ref, stamp)
            await self._remove_oldest()
        self._served.move_to_end(folder)
        return known

    async def _remove_oldest(self) -> None:
        idle = [folder for folder, served in self._served.items() if not served.users]
        for folder in idle[: max(0, len(self._served) - SERVED)]:
            await asyncio.to_thread(shutil.rmtree, self._served.pop(folder).ref.folder, ignore_errors=True)

    def _stamp(self, folder: str) -> tuple[int, int] | None:
        """Inode and time, which each save changes; None for an adapter that was deleted."""
        try:
            file = (self._job.folder / folder / "adapter_model.safetensors").stat()
        except OSError:
            return None
        return file.st_ino, file.st_mtime_ns

    # one sample ----------------------------------------------------------------------------------------------------
    async def _answer(self, request_id: str, request: ClientRequest, call: Sample) -> None:
        metrics = self._job.metrics
        began, used = metrics.started(request), None
        try:
            await self._quotas.check(request.owner, request.kind)
            folder = await self._checkpoint(call)
            async with self._adapter(folder) as adapter:
                scored = await self._prompt_logprobs(call, folder)
                sequences = await gather_or_cancel(
                    [self._sequence(call, number, adapter) for number in range(call.num_samples)]
                )
            prompt, sampled = len(call.prompt.ids), sum(len(one.token_ids) for one in sequences)
            used = ClientUsage(tokens=prompt + sampled)
            metrics.samples.labels(request.owner).inc(len(sequences))
            metrics.tokens.labels(request.owner, "prompt").inc(prompt)
            metrics.tokens.labels(request.owner, "sampled").inc(sampled)
            result = RequestResult(PROTOBUF, write_sample(sequences, scored))
        except QueueUnavailable as error:
            logger.warning("sample %s waits: %s", request_id, error)
            self._known.discard(request_id)
            return
        except (BadRequest, BadRequestData) as error:
            result = failed(str(error))
        except (EngineError, OSError) as error:
            logger.warning("sample %s: %s", request_id, error)
            result = failed(str(error), "server")
        except Exception as error:  # the request would stay open, and its client would wait for it
            logger.exception("sample %s", request_id)
            result = failed(f"{type(error).__name__} in the server", "server")
        metrics.ended(request, outcome_of(result), began)
        await self._finish(request_id, result, used)

    async def _sequence(self, call: Sample, number: int, adapter: AdapterRef | None) -> SampledTokens:
        params, ids = call.sampling_params, call.prompt.ids
        room = self._job.rollout.max_model_len - len(ids)
        if room < 1:
            raise BadRequestData(f"the prompt has {len(ids)} tokens, and the context {room + len(ids)}")
        texts, stop_ids = self._stops(params.stop)
        sampling = Sampling(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k if params.top_k > 0 else -1,
            max_new_tokens=min(params.max_tokens or room, room),
            stop_token_ids=tuple(stop_ids),
            seed=None if params.seed is None else (params.seed + number) % 2**63,
        )
        request = GenerateRequest(token_ids=ids, sampling=sampling, adapter=adapter)
        tokens: list[int] = []
        logprobs: list[float] = []
        async for chunk in (stream := self._client.stream(request)):
            tokens += chunk.token_ids
            logprobs += chunk.logprobs
            if texts and (end := self._end(tokens, texts)):
                await stream.aclose()
                return SampledTokens(tokens[:end], logprobs[:end], stopped=True)
            if chunk.finish_reason is not None:
                return SampledTokens(tokens, logprobs, stopped=chunk.finish_reason == "stop")
        raise EngineError("the answer has no end")

    def _stops(self, stop: str | list[str] | list[int] | None) -> tuple[list[str], list[int]]:
        """(texts, ids) that end a sequence: the model's own end, unless the client says which."""
        if stop is None:
            end = self._tokenizer.eos_token_id
            return [], [] if end is None else [end]
        if isinstance(stop, str):
            return [stop], []
        return [one for one in stop if isinstance(one, str)], [one for one in stop if isinstance(one, int)]

    def _end(self, tokens: list[int], texts: Sequence[str]) -> int:
        """Return the number of tokens until one of `texts` is in them; 0 if none is."""
        if not any(text in self._tokenizer.decode(tokens) for text in texts):
            return 0
        low, high = 0, len(tokens)
        while low + 1 < high:
            middle = (low + high) // 2
            has = any(text in self._tokenizer.decode(tokens[:middle]) for text in texts)
            low, high = (low, middle) if has else (middle, high)
        return high

    async def _prompt_logprobs(self, call: Sample, folder: str | None) -> NDArray[np.float32] | None:
        if not call.prompt_logprobs:
            return None
        ids = np.array(call.prompt.ids, np.int64)
        path = None if folder is None else self._job.folder / folder
        (scored,) = await self._in_torch(self._models.score, [ids], path)
        if call.prompt_logprobs_last_n is not None:
            scored[: max(0, len(scored) - call.prompt_logprobs_last_n)] = np.nan
        return scored

    async def _finish(self, request_id: str, result: RequestResult, used: ClientUsage | None) -> None:
        """A result that Redis does not take is made again: the request stays open."""
        try:
            await self._requests.finish(request_id, result, used=used)
        except QueueUnavailable as error:
            logger.warning("the result of sample %s is lost, and made again: %s", request_id, error)
            self._known.discard(request_id)


def in_turns(waiting: Sequence[Waiting], in_flight: Iterable[str]) -> list[Waiting]:
    """`waiting` in the order in which places go to them: each to the owner who has the fewest so far. `in_flight`: the
    owners of those that have a place."""
    places, ranks = Counter(in_flight), []
    for _, request, _ in waiting:
        ranks.append(places[request.owner])
        places[request.owner] += 1
    return [one for _, one in sorted(zip(ranks, waiting, strict=True), key=lambda pair: pair[0])]
