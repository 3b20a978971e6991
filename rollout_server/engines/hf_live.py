"""Requests that an hf engine is answering, and what of their answers was handed on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock.rollout_server.engines.hf_sampling import Record
from penstock.rollout_server.protocol import Chunk, FinishReason, slice_spans


@dataclass(slots=True)
class Live:
    """A request that was added and is not yet answered in full."""

    record: Record
    sent: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None


L = TypeVar("L", bound=Live)


class LiveRequests(Generic[L]):
    """By name. `on_finish` is called, in whatever thread, when one has ended."""

    def __init__(self, on_finish: Callable[[], None]) -> None:
        self._live: dict[str, L] = {}
        self._on_finish = on_finish

    def collect(self, *, only_ended: bool = False) -> list[tuple[str, Chunk | str]]:
        """New tokens of every request since the last call, or why one failed; those that ended are forgotten."""
        news: list[tuple[str, Chunk | str]] = []
        for name, live in list(self._live.items()):
            reason = live.finish_reason  # looked at once: a swap under way may set it meanwhile
            if only_ended and not (reason or live.error):
                continue
            if live.error is not None:
                news.append((name, live.error))
            elif reason or len(live.record.samples) > live.sent:
                news.append((name, _take_chunk(live, reason)))
            if reason or live.error is not None:
                del self._live[name]
        return news

    @property
    def in_flight(self) -> int:
        return len(self._live)


def _take_chunk(live: Live, reason: FinishReason | None) -> Chunk:
    start, end = live.sent, len(live.record.samples)
    live.sent = end
    new = live.record.samples[start:end]
    return Chunk.model_construct(
        token_ids=[token for token, _ in new],
        logprobs=[logprob for _, logprob in new],
        version_spans=slice_spans(list(live.record.cuts), start, end),
        finish_reason=reason,
    )
