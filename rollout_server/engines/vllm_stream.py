"""One request to vLLM's token endpoint: its events, taken apart.

Tokens are labelled with the version that the engine has when they are received. That is exact because versions change
only while the engine is paused and idle, and only after every token sampled before the pause was received
(`VLLMEngine._settle`); vLLM's own spans come with the last event.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx

from penstock.rollout_server.engines.answer_stream import AnswerStream, version_of
from penstock.rollout_server.protocol import EngineError, FinishReason

_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort", "repetition": "stop"}


class TokenStream(AnswerStream):
    """One answer of vLLM."""

    engine = "vLLM"
    path = "/inference/v1/generate"

    def __init__(self, http: httpx.AsyncClient, body: dict[str, Any], current_version: Callable[[], int]) -> None:
        super().__init__(http, body)
        self._current_version = current_version

    def _receive(self, event: dict[str, Any]) -> None:
        if error := event.get("error"):
            raise EngineError(f"vLLM: {error.get('message', error)}", retryable=error.get("code", 500) >= 500)
        for choice in event["choices"]:
            self._append(choice["token_ids"] or [], (choice["logprobs"] or {}).get("content") or [])
            if choice["finish_reason"] is not None:
                self._finish(choice)

    def _append(self, token_ids: list[int], logprobs: list[dict[str, Any]]) -> None:
        self._add(token_ids, [entry["logprob"] for entry in logprobs], self._current_version())

    def _finish(self, choice: dict[str, Any]) -> None:
        if choice["finish_reason"] not in _FINISH:
            raise EngineError(f"vLLM ended the answer with {choice['finish_reason']!r}")
        spans = choice.get("weight_versions")
        reported = spans and [(span["start"], version_of(span["version"])) for span in spans]
        self._end(_FINISH[choice["finish_reason"]], reported)

    def _refusal(self, status: int, body: bytes) -> EngineError:
        return refusal(status, body)


def refusal(status: int, body: bytes) -> EngineError:
    """vLLM's answer to a bad request; 4xx would be refused by any other server too."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body.decode(errors="replace")[:500]
    return EngineError(f"vLLM answered {status}: {message}", retryable=status >= 500)
