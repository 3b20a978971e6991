"""One request to SGLang's `/generate`: its events, taken apart.

Each event carries the tokens since the last one, and the version that SGLang's front end had when it took them in. Its
scheduler sends tokens and the replies to control calls through two sockets, of which the second may overtake the first:
tokens of the old version can get the new one's label, never the other way round. So tokens are certain while the label
is the version that the request was sent under. From the first newer one on they wait for the spans of the last event,
which the scheduler itself counts.
"""

from __future__ import annotations

import contextlib
from typing import Any

import aiohttp

from penstock.rollout_server.engines.answer_stream import AnswerStream, version_of
from penstock.rollout_server.protocol import EngineError, FinishReason

ABORT_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
"""How long the server may take to note that an answer is not wanted any more."""
_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class SGLangStream(AnswerStream):
    """One answer of SGLang, asked for under `version`.

    `body["rid"]` is its name there; none may be the beginning of another.
    """

    engine = "SGLang"
    path = "/generate"

    def __init__(self, http: aiohttp.ClientSession, body: dict[str, Any], version: int) -> None:
        super().__init__(http, body)
        self._http = http
        self._version = version
        self._rid: str = body["rid"]

    async def close(self) -> None:
        """SGLang would notice the closed connection only two seconds later, and sample on until then."""
        if not self.ended:
            # A server that does not answer this is gone or hangs, which its supervisor finds out by itself.
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, RuntimeError):
                async with self._http.post("/abort_request", json={"rid": self._rid}, timeout=ABORT_TIMEOUT):
                    pass
        await super().close()

    def _receive(self, event: dict[str, Any]) -> None:
        meta = event["meta_info"]
        label = version_of(meta["weight_version"])
        self._add(event["output_ids"], logprobs_of(event), label, certain=label == self._version)
        if (reason := meta["finish_reason"]) is not None:
            self._finish(reason, meta)

    def _finish(self, reason: dict[str, Any], meta: dict[str, Any]) -> None:
        status = reason.get("status_code")
        if reason["type"] not in _FINISH or status is not None:  # an abort with a status is the server's refusal
            raise EngineError(
                f"SGLang ended the answer with {reason['type']!r}: {reason.get('message')}",
                retryable=status is None or status >= 500,
            )
        if isinstance(reason.get("matched"), str):  # no stop string is ever sent; the last id was replaced by another
            raise EngineError(f"SGLang ended the answer by itself: {reason['matched']}")
        spans = meta.get("weight_versions")
        reported = spans and [(span["start"], version_of(span["version"])) for span in spans]
        self._end(_FINISH[reason["type"]], reported)


def logprobs_of(event: dict[str, Any]) -> list[float]:
    """Of `output_ids`, in order. Raises `EngineError` where SGLang's pairs are of other tokens."""
    pairs = event["meta_info"].get("output_token_logprobs") or []
    if (ids := [pair[1] for pair in pairs]) != event["output_ids"]:
        raise EngineError(f"SGLang sent tokens {event['output_ids']} with logprobs of {ids}")
    return [pair[0] for pair in pairs]
