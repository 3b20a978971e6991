"""Samples of a service: on the run's rollout servers, which have one adapter at a time.

    open samples by adapter ─► the servers' adapter is another one? wait for what is in flight ─► announce it as the
    next version ─► every server has it ─► all samples of that adapter ─► results

An adapter that was announced before gets a new version: numbers are never used again. Samples of other adapters wait
for `TURN_S` at most while samples of the present one keep coming. Owners take turns, for adapters and for samples.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from penstock.common import cancel_and_wait, gather_or_cancel
from penstock.rollout_server import BadRequest, EngineError, GenerateRequest, RolloutClient, Sampling, find_model
from penstock.service.calls import CheckpointRecord, Sample, SamplerRecord
from penstock.service.job import ServiceJob, failed, outcome_of
from penstock.service.messages import PROTOBUF, SampledTokens, write_sample
from penstock.trainer.service import BadRequestData
from penstock.transfer_queue import Announcement, ClientRequest, QueueUnavailable, RequestLog, RequestResult
from penstock.weight_sync import WeightsRefused

if TYPE_CHECKING:
    from penstock.trainer import TorchThread
    from penstock.trainer.service import ClientModels
    from penstock.transfer_queue import RedisTransferQueue

POLL_S = 0.03
TURN_S = 5.0
"""The servers keep an adapter for so long, if others wait and it is still asked for."""
MOUNT_S = 300.0
"""Longest time until every server has an adapter."""
UNMOUNTED = "?"
"""No adapter of this process is at the servers."""
logger = logging.getLogger(__name__)
Waiting = tuple[str, ClientRequest, Sample]
"""A request by its id, and its call."""


class SampleRunner:
    """Used as a context; `run` in a task of its own."""

    def __init__(self, job: ServiceJob, models: ClientModels, requests: RequestLog, in_torch: TorchThread) -> None:
        from transformers import AutoTokenizer

        from penstock.weight_sync import WeightFiles

        self._job, self._models, self._requests, self._in_torch = job, models, requests, in_torch
        self._queue: RedisTransferQueue = job.run.queue  # type: ignore[assignment]
        self._client = RolloutClient(job.run.queue, job.run.token, job.rollout.request_timeout_s)
        model = find_model(job.run.model)
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        rollout = job.rollout
        self._files = WeightFiles(
            job.weights_dir,
            rollout.manifest_transport,
            token=job.run.token,
            host=rollout.weights_host,
            port=rollout.weights_port,
            model=Path(model),
        )
        self._mounted: str | None = UNMOUNTED
        """Folder of the servers' adapter; None: the base model."""
        self._mounted_files: tuple[int, int] | None = None
        """Stamp of its file when it was read."""
        self._version = 0
        self._mounted_at = 0.0
        self._waiting: dict[str | None, list[Waiting]] = {}
        """Samples by adapter; the adapter that has waited longest is first."""
        self._turns: dict[str, float] = {}
        """When an adapter was last put at the servers for an owner."""
        self._known: set[str] = set()
        self._tasks: dict[asyncio.Task[None], str] = {}
        """The owner of each sample in flight."""

    async def __aenter__(self) -> Self:
        await self._files.open(await self._queue.claim_training(f"service {os.getpid()}"))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        await cancel_and_wait(self._tasks)
        await self._client.close()
        await self._files.close()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self._look()
                if (folder := self._next()) is not UNMOUNTED:
                    await self._serve(folder)
            except QueueUnavailable as error:
                logger.warning("samples wait: %s", error)

    async def _look(self) -> None:
        """Sort new requests by adapter."""
        open_ids = await self._requests.open_requests()
        self._known &= set(open_ids)
        for request_id in (one for one in open_ids if one not in self._known):
            request = await self._requests.request(request_id)
            if request is None or request.kind != "sample":
                continue
            call = Sample.model_validate_json(request.body)
            sampler = await SamplerRecord.read(self._requests, call.sampling_session_id)
            if problem := await self._problem(sampler, call):
                await self._finish(request_id, failed(problem))
                continue
            assert sampler is not None
            self._waiting.setdefault(sampler.folder, []).append((request_id, request, call))
            self._known.add(request_id)

    async def _problem(self, sampler: SamplerRecord | None, call: Sample) -> str:
        """The reason why the weights of a sampling session can be sampled no more; empty if they can."""
        if sampler is None:
            return f"sampler {call.sampling_session_id} is not here any more"
        if sampler.saved is None or sampler.model_path is None:
            return ""
        checkpoint = await CheckpointRecord.read(self._requests, sampler.model_path)
        if checkpoint is None or checkpoint.created == sampler.saved:
            return ""
        return f"{sampler.model_path} was saved again after this session began: create another sampling session for it"

    def _next(self) -> str | None:
        """The adapter whose samples come next; `UNMOUNTED` if none wait."""
        if not self._waiting:
            return UNMOUNTED
        others = {folder: waiting for folder, waiting in self._waiting.items() if folder != self._mounted}
        in_turn = time.monotonic() - self._mounted_at < TURN_S
        stays = self._mounted in self._waiting and (in_turn or not others)
        return self._mounted if stays else next_adapter(others, self._turns)

    async def _serve(self, folder: str | None) -> None:
        if not self._is_mounted(folder):
            if self._tasks:
                await asyncio.wait(self._tasks)
            try:
                await self._mount(folder)
            except (OSError, ValueError, WeightsRefused) as error:
                logger.exception("adapter %s", folder)
                for request_id, _, _ in self._waiting.pop(folder):
                    await self._finish(request_id, failed(f"its weights cannot be served: {error}", "server"))
                return
            self._turns |= dict.fromkeys((request.owner for _, request, _ in self._waiting[folder]), self._mounted_at)
        most = self._job.rollout.max_concurrent * max(1, self._job.rollout.servers)
        waiting = in_turns(self._waiting.pop(folder), self._tasks.values())
        room = max(0, most - len(self._tasks))
        if rest := waiting[room:]:
            self._waiting[folder] = rest
        for request_id, request, call in waiting[:room]:
            answer = self._answer(request_id, request, call, folder)
            task = asyncio.create_task(answer, name=request_id)
            self._tasks[task] = request.owner
            task.add_done_callback(self._tasks.pop)

    def _is_mounted(self, folder: str | None) -> bool:
        """Returns True if the servers have this adapter as it is now: a save under its name replaces it."""
        return folder == self._mounted and self._files_of(folder) in (None, self._mounted_files)

    def _files_of(self, folder: str | None) -> tuple[int, int] | None:
        """A stamp that each save changes; None for the base model, and for an adapter that was deleted."""
        try:
            file = None if folder is None else (self._job.folder / folder / "adapter_model.safetensors").stat()
        except OSError:
            return None
        return file and (file.st_ino, file.st_mtime_ns)

    async def _mount(self, folder: str | None) -> None:
        """Raises `OSError`, `ValueError` for an adapter that cannot be read, `TimeoutError`, `WeightsRefused` for a
        base model that no adapter can be added to."""
        self._mounted, began = UNMOUNTED, time.monotonic()
        stamp = self._files_of(folder)
        path = None if folder is None else self._job.folder / folder
        settings, weights = await asyncio.to_thread(self._models.peft_of, path)
        version = (await self._queue.status()).version + 1
        manifest = await asyncio.to_thread(self._files.write_adapter, version, weights.items(), settings)
        if not await self._queue.announce_sampler(Announcement(version, manifest.as_dict())):
            raise ValueError("another trainer has announced weights meanwhile")
        await self._until_served(version, began + MOUNT_S)
        self._mounted, self._version, self._mounted_at = folder, version, time.monotonic()
        self._mounted_files = stamp
        self._job.metrics.mount_s.observe(self._mounted_at - began)

    async def _until_served(self, version: int, deadline: float) -> None:
        """Returns when all servers that take requests have `version`: one that starts loads it before it takes any.

        Raises `ValueError` with a refusal, `TimeoutError` with the servers that are late.
        """
        while True:
            servers = await self._queue.servers()
            if refused := [one.refusal for one in servers if one.refused == version]:
                raise ValueError(refused[0])
            accepting = [one for one in servers if one.accepting]
            late = [one.server_id for one in accepting if one.version != version]
            if accepting and not late:
                return
            if time.monotonic() > deadline:
                names = ", ".join(late) or "any rollout server"
                raise TimeoutError(f"not loaded by {names} within {MOUNT_S:g} s")
            await asyncio.sleep(POLL_S)

    # one sample ----------------------------------------------------------------------------------------------------
    async def _answer(self, request_id: str, request: ClientRequest, call: Sample, folder: str | None) -> None:
        metrics, version = self._job.metrics, self._version
        began = metrics.started(request)
        try:
            scored = await self._prompt_logprobs(call, folder)
            sequences = await gather_or_cancel(
                [self._sequence(call, number, version) for number in range(call.num_samples)]
            )
            metrics.samples.labels(request.owner).inc(len(sequences))
            metrics.tokens.labels(request.owner, "prompt").inc(len(call.prompt.ids))
            metrics.tokens.labels(request.owner, "sampled").inc(sum(len(one.token_ids) for one in sequences))
            result = RequestResult(PROTOBUF, write_sample(sequences, scored))
        except (BadRequest, BadRequestData) as error:
            result = failed(str(error))
        except (EngineError, OSError) as error:
            logger.warning("sample %s: %s", request_id, error)
            result = failed(str(error), "server")
        except Exception as error:  # the request would stay open, and its client would wait for it
            logger.exception("sample %s", request_id)
            result = failed(f"{type(error).__name__} in the server", "server")
        metrics.ended(request, outcome_of(result), began)
        await self._finish(request_id, result)

    async def _sequence(self, call: Sample, number: int, version: int) -> SampledTokens:
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
        request = GenerateRequest(token_ids=ids, sampling=sampling, min_version=version)
        tokens: list[int] = []
        logprobs: list[float] = []
        async for chunk in (stream := self._client.stream(request)):
            if any(span[0] != version for span in chunk.version_spans):
                raise EngineError(f"the servers have other weights than version {version}")
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

    async def _finish(self, request_id: str, result: RequestResult) -> None:
        """A result that Redis does not take is made again: the request stays open."""
        try:
            await self._requests.finish(request_id, result)
        except QueueUnavailable as error:
            logger.warning("the result of sample %s is lost, and made again: %s", request_id, error)
            self._known.discard(request_id)


def next_adapter(waiting: Mapping[str | None, Sequence[Waiting]], turns: Mapping[str, float]) -> str | None:
    """Returns the waiting adapter (None: the base model) whose owner's last turn is longest ago."""
    return min(waiting, key=lambda folder: min(turns.get(request.owner, 0.0) for _, request, _ in waiting[folder]))


def in_turns(waiting: Sequence[Waiting], in_flight: Iterable[str]) -> list[Waiting]:
    """`waiting` in the order in which places go to them: each to the owner who has the fewest so far. `in_flight`: the
    owners of those that have a place."""
    places, ranks = Counter(in_flight), []
    for _, request, _ in waiting:
        ranks.append(places[request.owner])
        places[request.owner] += 1
    return [one for _, one in sorted(zip(ranks, waiting, strict=True), key=lambda pair: pair[0])]
