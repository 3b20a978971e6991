"""The engine `served`: a model that another process serves already, for evaluations. Nothing is started or loaded.

    Penstock's rollout server   POST /generate, its token in PENSTOCK_SERVED_KEY     ids, logprobs, policy versions
    vLLM, and what speaks so    POST /v1/completions with `return_token_ids`         ids, logprobs; version 0

A server that returns no token ids is refused at start: ids made from its text would be others than it sampled.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.engines.checkpoint import vocab_size
from penstock.rollout_server.engines.http.stream import refusal
from penstock.rollout_server.protocol import (
    Chunk,
    EngineError,
    EngineInfo,
    FinishReason,
    GenerateRequest,
    Sampling,
)
from penstock.weight_sync import LoadReport, Manifest, WeightsRefused

KEY_VARIABLE = "PENSTOCK_SERVED_KEY"
ASK_S = 30.0
READ_BYTES = 16 << 20
"""Longest line of an answer: the first event of vLLM has the ids of the whole prompt."""
OURS = "penstock"
_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class ServedEngine:
    """Implements `protocol.Engine` for one server."""

    def __init__(self, config: RolloutConfig, model: str, log_dir: Path, seed: int) -> None:
        if not config.url:
            raise EngineError("rollout.engine is served, and rollout.url is not set", retryable=False)
        self._config, self._model = config, model
        self._url = config.url.rstrip("/").removesuffix("/v1")
        self._http: aiohttp.ClientSession | None = None
        self._model_entry: dict[str, Any] = {}
        """The server's own entry in /v1/models."""

    async def start(self) -> EngineInfo:
        key = os.environ.get(KEY_VARIABLE)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = aiohttp.ClientSession(
            f"{self._url}/",
            headers=headers,
            # No limit: a health check must not wait for one of the streamed answers to end.
            connector=aiohttp.TCPConnector(limit=0),
            read_bufsize=READ_BYTES,
        )
        try:
            self._model_entry = (await self._get("v1/models"))["data"][0]
            await self._try_out()
        except (LookupError, TypeError) as error:
            raise EngineError(f"{self._url}/v1/models lists no model: {error!r}") from error
        longest = self._model_entry.get("max_model_len") or self._config.max_model_len
        return EngineInfo(
            name="served",
            engine_version=f"{self._model_entry.get('id')} at {self._url}",
            version=0,
            vocab_size=vocab_size(self._model),
            max_model_len=min(int(longest), self._config.max_model_len),
            limits=["A served model keeps its weights: it can be evaluated, not trained."],
        )

    async def stop(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        ended = False
        answer = self._ours if self._model_entry.get("owned_by") == OURS else self._theirs
        async with aclosing(answer(request)) as chunks:
            async for chunk in chunks:
                ended = chunk.finish_reason is not None
                yield chunk
        if not ended:
            raise EngineError(f"{self._url} broke off the answer")

    async def load_weights(self, manifest: Manifest) -> LoadReport:
        raise WeightsRefused(f"version {manifest.version}: a served model keeps its own weights")

    async def healthy(self) -> bool:
        try:
            await self._get("v1/models")
        except EngineError:
            return False
        return True

    def stderr_tail(self) -> str:
        return f"(see the log of {self._url})"

    # helpers -------------------------------------------------------------------------------------------------------
    @property
    def _session(self) -> aiohttp.ClientSession:
        assert self._http is not None, "start() comes first"
        return self._http

    async def _get(self, path: str) -> dict[str, Any]:
        """Raises `EngineError`."""
        try:
            async with self._session.get(path, timeout=aiohttp.ClientTimeout(ASK_S)) as response:
                if response.status != 200:
                    raise refusal(self._url, response.status, await response.read())
                answer: dict[str, Any] = await response.json()
                return answer
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise EngineError(
                f"{self._url}/{path}: {error!r}; is the server up, and {KEY_VARIABLE} its key?"
            ) from error

    async def _try_out(self) -> None:
        """One token. Raises `EngineError` where no ids come back."""
        request = GenerateRequest(token_ids=[0], sampling=Sampling(max_new_tokens=1))
        async with aclosing(self.generate(request)) as chunks:
            sampled = [token async for chunk in chunks for token in chunk.token_ids]
        if not sampled:
            raise EngineError(
                f"{self._url} returns no token ids from /v1/completions (return_token_ids): episodes are made of the "
                "ids that were sampled, and text does not give them back. Serve the model with vLLM, or let Penstock "
                "serve it: leave --url out",
                retryable=False,
            )

    def _body(self, request: GenerateRequest) -> dict[str, Any]:
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self._model_entry["id"],
            "prompt": request.token_ids,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            # A model's generation_config.json must not change the sampling.
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": True,  # the caller's ids alone end an answer
            "logprobs": 0,
            "return_token_ids": True,
            "stream": True,
        }
        return body if sampling.seed is None else body | {"seed": sampling.seed}

    async def _ours(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        """Raises `EngineError`."""
        async with aclosing(self._lines("generate", request.model_dump(mode="json"))) as lines:
            async for line in lines:
                if line.strip():
                    yield _chunk(self._url, line)

    async def _theirs(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        """Raises `EngineError`."""
        async with aclosing(self._lines("v1/completions", self._body(request))) as lines:
            async for line in lines:
                if line.startswith(b"data: {"):
                    for chunk in _chunks_of(self._url, line[6:]):
                        yield chunk

    async def _lines(self, path: str, body: dict[str, Any]) -> AsyncGenerator[bytes]:
        """Lines of the streamed answer. Raises `EngineError`."""
        limit = aiohttp.ClientTimeout(self._config.request_timeout_s)
        try:
            async with self._session.post(path, json=body, timeout=limit) as response:
                if response.status != 200:
                    raise refusal(self._url, response.status, await response.read())
                async for line in response.content:
                    yield line
        except (aiohttp.ClientError, HttpProcessingError, TimeoutError, ValueError) as error:
            raise EngineError(f"{self._url}/{path} broke off: {error!r}") from error


def _chunks_of(url: str, event: bytes) -> list[Chunk]:
    """Chunks of one event of a server of completions. Raises `EngineError`."""
    try:
        return list(_choices_of(url, json.loads(event)))
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise EngineError(f"{url} sent an event of another form than expected: {error!r}") from error


def _choices_of(url: str, event: dict[str, Any]) -> Iterator[Chunk]:
    if error := event.get("error"):
        raise EngineError(f"{url}: {error.get('message', error)}")
    for choice in event.get("choices", ()):
        token_ids, reason = choice.get("token_ids") or [], choice.get("finish_reason")
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
        if len(token_ids) != len(logprobs):
            raise EngineError(f"{url} sent {len(token_ids)} tokens with {len(logprobs)} logprobs")
        if reason is not None and reason not in _FINISH:
            raise EngineError(f"{url} ended the answer with {reason!r}")
        if token_ids or reason is not None:
            spans = [(0, 0, len(token_ids))] if token_ids else []
            finish = None if reason is None else _FINISH[reason]
            yield Chunk(token_ids=token_ids, logprobs=logprobs, version_spans=spans, finish_reason=finish)


def _chunk(url: str, line: bytes) -> Chunk:
    """The chunk of one line of a rollout server. Raises `EngineError`."""
    try:
        if error := json.loads(line).get("error"):
            raise EngineError(f"{url}/generate: {error.get('message', error)}")
        return Chunk.model_validate_json(line)
    except (AttributeError, ValueError):
        raise EngineError(f"{url}/generate sent a line of another form than expected: {line[:500]!r}") from None
