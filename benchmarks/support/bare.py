"""A stock server asked directly, with the least that a caller needs: one session, one pass over the events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import aiohttp

from benchmarks.support.load import Ask

EVENT = b"data: {"


class BareEngine:
    """`stream` for one engine. `address` is what `engine_process.find_address` gave."""

    def __init__(self, engine: str, address: dict[str, str]) -> None:
        self._path, self._body, self._count = DIALECTS[engine]
        connector = aiohttp.UnixConnector(address["socket"], limit=0) if address.get("socket") else None
        self._http = aiohttp.ClientSession(
            address["url"],
            connector=connector or aiohttp.TCPConnector(limit=0),
            headers={"Authorization": f"Bearer {address['key']}"},
            timeout=aiohttp.ClientTimeout(total=600),
            read_bufsize=1 << 20,
            trust_env=False,
        )

    async def stream(self, ask: Ask) -> AsyncGenerator[int]:
        ids: list[int] = []
        logprobs: list[float] = []
        async with self._http.post(self._path, json=self._body(ask)) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(EVENT):
                    before = len(ids)
                    self._count(json.loads(line[6:]), ids, logprobs)
                    yield len(ids) - before
        if len(ids) != len(logprobs):
            raise ValueError(f"{len(ids)} tokens with {len(logprobs)} logprobs")

    async def close(self) -> None:
        await self._http.close()


def _vllm_body(ask: Ask) -> dict[str, Any]:
    params = {"temperature": 1.0, "max_tokens": ask.answer_tokens, "ignore_eos": True, "detokenize": False}
    return {"model": "policy", "token_ids": ask.token_ids, "sampling_params": {**params, "logprobs": 0}, "stream": True}


def _vllm_event(event: dict[str, Any], ids: list[int], logprobs: list[float]) -> None:
    for choice in event["choices"]:
        ids += choice["token_ids"] or []
        logprobs += [entry["logprob"] for entry in (choice["logprobs"] or {}).get("content") or []]


def _sglang_body(ask: Ask) -> dict[str, Any]:
    params = {"temperature": 1.0, "max_new_tokens": ask.answer_tokens, "ignore_eos": True}
    return {"input_ids": ask.token_ids, "sampling_params": params, "return_logprob": True, "stream": True}


def _sglang_event(event: dict[str, Any], ids: list[int], logprobs: list[float]) -> None:
    ids += event["output_ids"]
    logprobs += [entry[0] for entry in event["meta_info"]["output_token_logprobs"]]


Dialect = tuple[str, Callable[[Ask], dict[str, Any]], Callable[[dict[str, Any], list[int], list[float]], None]]
DIALECTS: dict[str, Dialect] = {
    "vllm": ("/inference/v1/generate", _vllm_body, _vllm_event),
    "sglang": ("/generate", _sglang_body, _sglang_event),
}
