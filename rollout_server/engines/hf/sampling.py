"""Sampling for a batch of requests, each with its own settings, and the record of what was sampled.

The record is made in the forward pass itself, so a token's logprob and policy version are those of the weights that
sampled it, whatever happens to the request later (invariant 1). `LiveRequests` passes the records on as chunks.
`HaltingRequests` owns the decoding thread, which is paused while weights are exchanged or memory is released.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from penstock.rollout_server.protocol import Chunk, FinishReason, Sampling, slice_spans
from penstock.rollout_server.routed_experts import encode_rows

IDLE_S = 1.0
BELOW_ONE = 1.0 - 2.0**-40
"""Largest point of a draw: times a sum of weights it stays below the sum."""


@dataclass(slots=True)
class ActiveRequest:
    """A request that was added and is not yet answered in full."""

    record: Record
    sent: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None

    def take_chunk(self, reason: FinishReason | None) -> Chunk:
        """Returns the records since the last call."""
        start, end = self.sent, len(self.record.samples)
        self.sent = end
        new, routed = self.record.samples[start:end], self.record.routed[start:end]
        return Chunk.model_construct(
            token_ids=[token for token, _ in new],
            logprobs=[logprob for _, logprob in new],
            version_spans=slice_spans(list(self.record.cuts), start, end),
            finish_reason=reason,
            routed_experts=[encode_rows(np.concatenate(routed))] if routed else [],  # none: the end came after all
        )


L = TypeVar("L", bound=ActiveRequest)
H = TypeVar("H")


class LiveRequests(Generic[L]):
    """Running requests by name. `on_finish` is called, in whatever thread, when one has ended."""

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
                news.append((name, live.take_chunk(reason)))
            if reason or live.error is not None:
                del self._live[name]
        return news

    @property
    def in_flight(self) -> int:
        return len(self._live)


class HaltingRequests(LiveRequests[L], ABC, Generic[L, H]):
    """Owns the decoding thread, which the subclass starts. `swap`, `halt`, `go_on` and `sleep` wait for the pass under
    way: they come from another thread than the event loop's."""

    def __init__(self, on_finish: Callable[[], None]) -> None:
        super().__init__(on_finish)
        self._turn = threading.Condition()
        """Held for each pass, and for each exchange of the weights."""
        self._swaps_waiting = 0
        self._news = threading.Event()
        """The decoding thread has something to do."""
        self._halt: H | None = None
        """Result of `_stop_decoding` while decoding is paused."""
        self._asleep = self._stopping = False
        self.fatal_error: str | None = None
        """Why the decoding thread is gone; None while it runs."""
        self._thread = threading.Thread(target=self._run, name="hf-decoding", daemon=True)

    @abstractmethod
    def _stop_decoding(self) -> H:
        """Called between two passes; what it returns is never false."""

    @property
    def stands_still(self) -> bool:
        """Between `halt` and what ends it."""
        return self._halt is not None

    @contextmanager
    def _between_passes(self) -> Iterator[None]:
        """The decoding thread waits for the end of the block."""
        self._swaps_waiting += 1
        with self._turn:
            self._swaps_waiting -= 1
            yield
            self._turn.notify_all()

    def halt(self) -> None:
        """No pass after the one under way, until a swap or `go_on`; requests in flight are treated as at a swap."""
        with self._between_passes():
            self._halt = self._stop_decoding()

    def sleep(self) -> None:
        """Ends all answers with their tokens so far and drops the cache. Called between two passes."""
        with self._between_passes():
            self._asleep = True
            self._turn_away()

    def wake(self) -> None:
        """Requests are computed again."""
        self._asleep = False
        self._news.set()

    @abstractmethod
    def _turn_away(self) -> None:
        """Ends all requests that are here; nothing of the cache is left."""

    @abstractmethod
    def _decode(self) -> bool:
        """Computes what there is; False: there was nothing."""

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._news.clear()
                if not self._decode():
                    self._news.wait(IDLE_S)
        except BaseException as error:  # whatever it is, the owner ends this process with it
            self.fatal_error = f"{type(error).__name__}: {error}"
            self._on_finish()
            raise

    def go_on(self) -> None:
        """The weights are what they were at `halt`."""
        with self._turn:
            self._halt = None
        self._news.set()


@dataclass(slots=True)
class Record:
    """One request as the sampler knows it. Appended to by the decoding thread, read by the event loop."""

    sampling: Sampling
    context_len: int
    samples: list[tuple[int, float]] = field(default_factory=list)
    """(id, logprob) in order; one append per token, so that a reader sees both or neither."""
    cuts: list[tuple[int, int]] = field(default_factory=list)
    """(first sampled position, policy version), ascending."""
    routed_from: int | None = None
    """Position in the context from which on routed experts are asked for; None: of none."""
    routed: list[NDArray[Any]] = field(default_factory=list)
    """Routes by sample, added before it: rows of the positions that no sample before it has, up to the pass that
    sampled it. Never changed: what a later pass of the same positions chooses, of other weights, is not what sampled
    this token.
    """

    def append(self, token: int, logprob: float, version: int) -> None:
        if not self.cuts or self.cuts[-1][1] != version:
            self.cuts.append((len(self.samples), version))
        self.samples.append((token, logprob))


class Sampler:
    """Draws from logits [R, V]. `version` names the weights in the model; set only while decoding is paused."""

    def __init__(self, seed: int, version: int = 0) -> None:
        self.version = version
        self._random = Random(seed)

    def draw(self, logits: torch.Tensor, records: Sequence[Record]) -> torch.Tensor:
        """Next ids [R], one per row and record; every record is extended.

        The inverse of the cumulative distribution, in float64: one number per row decides, and an id of probability 0
        is never drawn.
        """
        shaped = _shape_logits(logits, [record.sampling for record in records])
        highest = shaped.amax(dim=-1, keepdim=True)
        mass = (shaped - highest).exp_().cumsum(-1, dtype=torch.float64)
        points = torch.tensor([self._point(record) for record in records], dtype=torch.float64).unsqueeze(1)
        ids = torch.searchsorted(mass, points * mass[:, -1:], right=True)
        ids.clamp_(max=logits.shape[1] - 1)  # a row of NaN has no place; its logprob says so
        greedy = [record.sampling.temperature == 0.0 for record in records]
        if any(greedy):
            ids = torch.where(torch.tensor(greedy).unsqueeze(1), shaped.argmax(dim=-1, keepdim=True), ids)
        logprobs = shaped.gather(1, ids) - highest - mass[:, -1:].log().to(shaped.dtype)
        for record, token, logprob in zip(records, ids[:, 0].tolist(), logprobs[:, 0].tolist(), strict=True):
            record.append(token, logprob, self.version)
        return ids[:, 0]

    def _point(self, record: Record) -> float:
        """Return the draw, a number in [0, 1)."""
        if record.sampling.seed is None:
            return self._random.random() * BELOW_ONE
        # By position, not by order of calls: an answer that continues elsewhere draws the same there.
        position = record.context_len + len(record.samples)
        return xxhash.xxh3_64_intdigest(f"{record.sampling.seed}:{position}".encode()) / 2**64 * BELOW_ONE


def _shape_logits(logits: torch.Tensor, settings: Sequence[Sampling]) -> torch.Tensor:
    """Temperature and truncation per row. Greedy rows keep their logits: their logprobs are those at temperature 1."""
    temperatures = [sampling.temperature or 1.0 for sampling in settings]
    truncated = [row for row, sampling in enumerate(settings) if sampling.top_k > 0 or sampling.top_p < 1.0]
    if not truncated and all(temperature == 1.0 for temperature in temperatures):
        return logits
    shaped = logits / torch.tensor(temperatures, dtype=logits.dtype).unsqueeze(1)
    for row in truncated:
        shaped[row] = _truncate(shaped[row], settings[row])
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
