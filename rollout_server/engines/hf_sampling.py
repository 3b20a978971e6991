"""Sampling for a batch of requests, each with its own settings, and the record of what was sampled.

The record is made in the forward pass itself, so a token's logprob and policy version are those of the weights that
sampled it, whatever happens to the request later (invariant 1). `LiveRequests` passes the records on as chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
import xxhash

from penstock.rollout_server.protocol import Chunk, FinishReason, Sampling, slice_spans


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


@dataclass(slots=True)
class Record:
    """One request as the sampler knows it. Appended to by the decoding thread, read by the event loop."""

    sampling: Sampling
    context_len: int
    samples: list[tuple[int, float]] = field(default_factory=list)
    """(id, logprob) in order; one append per token, so that a reader sees both or neither."""
    cuts: list[tuple[int, int]] = field(default_factory=list)
    """(first sampled position, policy version), ascending."""

    def append(self, token: int, logprob: float, version: int) -> None:
        if not self.cuts or self.cuts[-1][1] != version:
            self.cuts.append((len(self.samples), version))
        self.samples.append((token, logprob))


class Sampler:
    """Draws from logits [R, V]. `version` names the weights in the model; set only while decoding is paused."""

    def __init__(self, seed: int, version: int = 0) -> None:
        self.version = version
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self, logits: torch.Tensor, records: Sequence[Record]) -> torch.Tensor:
        """Next ids [R], one per row and record; every record is extended."""
        scores = torch.log_softmax(_shape_logits(logits, [record.sampling for record in records]), dim=-1)
        # argmax(p / Exp(1)) is a draw from p.
        noise = torch.empty_like(scores).exponential_(generator=self._generator)
        for row, record in enumerate(records):
            self._settle_noise(noise[row], record)
        ids = (scores - noise.clamp_min(1e-30).log()).argmax(dim=-1)
        logprobs = scores.gather(1, ids.unsqueeze(1)).squeeze(1)
        for record, token, logprob in zip(records, ids.tolist(), logprobs.tolist(), strict=True):
            record.append(token, logprob, self.version)
        return ids

    def _settle_noise(self, noise: torch.Tensor, record: Record) -> None:
        if record.sampling.temperature == 0.0:
            noise.fill_(1.0)
        elif record.sampling.seed is not None:
            # By position, not by order of calls: an answer that continues elsewhere draws the same noise there.
            position = record.context_len + len(record.samples)
            seed = xxhash.xxh3_64_intdigest(f"{record.sampling.seed}:{position}".encode()) >> 1
            noise.exponential_(generator=torch.Generator().manual_seed(seed))


def _shape_logits(logits: torch.Tensor, settings: Sequence[Sampling]) -> torch.Tensor:
    """Temperature and truncation per row. Greedy rows keep their logits: their logprobs are those at temperature 1."""
    temperatures = torch.tensor([s.temperature or 1.0 for s in settings], dtype=logits.dtype).unsqueeze(1)
    shaped = logits / temperatures
    for row, sampling in enumerate(settings):
        if sampling.top_k > 0 or sampling.top_p < 1.0:
            shaped[row] = _truncate(shaped[row], sampling)
    return shaped


def _truncate(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """[V] with everything outside the top k, then outside the smallest set of mass top_p, at −inf."""
    values, order = logits.sort(descending=True)
    keep = torch.ones_like(values, dtype=torch.bool)
    if sampling.top_k > 0:
        keep[sampling.top_k :] = False
    mass = values.masked_fill(~keep, -torch.inf).softmax(-1)
    keep &= mass.cumsum(-1) - mass < sampling.top_p
    return logits.masked_fill(~torch.empty_like(keep).scatter_(0, order, keep), -torch.inf)
