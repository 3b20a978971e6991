"""Continuous batching: requests in, recorded tokens out, weights swapped between two passes.

    event loop      add, cancel ──► arrived;  collect ◄── Record
    decoding thread admit → choose → forward → Sampler.draw → Record → end
    loader thread   swap ── asks for a pause ──► the decoding thread grants it between two passes
                    halt ── the same; the pause then lasts until `swap` or `go_on`

A pass computes one token of every request that decodes and is filled up with prompts, cut to fit. No pass is under way
while weights are swapped, so every token was sampled either wholly before or wholly after.

    waiting ──admit──► running: prompt ──► decodes ──► ended
       ▲                  │
       └── put back ──────┘  no room for its keys and values, or a swap that must not keep them

The oldest running request is never put back for another's sake, and the cache holds at least one: there is always one
that gets on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.engines.hf.adapters import LayerAdapters
from penstock.rollout_server.engines.hf.attention import ForwardStep
from penstock.rollout_server.engines.hf.cache import PAGE_TOKENS, Row
from penstock.rollout_server.engines.hf.passes import forward, make_cache, routers_of, tokens_of_a_step
from penstock.rollout_server.engines.hf.sampling import HaltingRequests, Record, Sampler
from penstock.rollout_server.protocol import Sampling

STOP_S = 10.0


class Batcher(HaltingRequests[Row, tuple[float, int]]):
    """All methods but `swap`, `halt`, `go_on` and `sleep` are for the event loop."""

    def __init__(
        self,
        model: Any,
        config: RolloutConfig,
        seed: int,
        on_finish: Callable[[], None],
        step_tokens: int | None = None,
    ) -> None:
        """`step_tokens` of one pass; None: by the size of the model."""
        super().__init__(on_finish)
        self.sampler = Sampler(seed)
        self.steps = 0
        self._model, self._config = model, config
        self._step_tokens = max(step_tokens or tokens_of_a_step(model), 2 * config.max_concurrent)
        self.cache = make_cache(model, config)
        self.routers = routers_of(model) if config.routing_replay else None
        self.adapters = LayerAdapters(model) if config.adapter_rank else None
        self._arrived: deque[Row] = deque()
        self._waiting: deque[Row] = deque()
        self._running: list[Row] = []
        """Oldest first."""
        self._full = False
        """A request was put back for want of room: none is admitted before another has ended."""
        self._any_cancelled = False
        self._thread.start()

    # requests ------------------------------------------------------------------------------------------------------
    def add(
        self,
        name: str,
        token_ids: list[int],
        sampling: Sampling,
        routed_from: int | None = None,
        adapter: str | None = None,
    ) -> None:
        """Queue a request; its tokens come out of `collect`, with routed experts from position `routed_from` on."""
        record = Record(sampling, len(token_ids), routed_from=routed_from)
        row = self._live[name] = Row(record, ids=list(token_ids), adapter=adapter)
        if self.routers is not None:
            mixtures = self.routers.mixtures
            most = len(token_ids) + sampling.max_new_tokens
            row.experts = np.zeros((most, mixtures.layers, mixtures.per_token), dtype=mixtures.dtype)
        self._arrived.append(row)
        self._news.set()

    def cancel(self, name: str) -> None:
        """Free the request's place and KV before the next pass. Unknown names are fine."""
        if (row := self._live.pop(name, None)) is not None:
            row.cancelled = self._any_cancelled = True
            self._news.set()

    def stop(self) -> None:
        """End the decoding thread; what is in flight is dropped."""
        self._stopping = True
        self._news.set()
        self._thread.join(STOP_S)

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens whose KV was there already."""
        return self.cache.reused_tokens

    @property
    def kv_blocks_in_use(self) -> int:
        """Pages that requests hold; those kept only for their prefixes do not count."""
        return self.cache.pages_in_use

    @property
    def cache_bytes(self) -> tuple[int, int]:
        """(held now, held at most)"""
        return self.cache.held_bytes, self.cache.most_bytes

    def swap(self, load: Callable[[], None], version: int) -> tuple[float, float, int]:
        """Between two passes: `load()`, then `version` names the weights. Returns (pause_s, load_s, in_flight)."""
        with self._between_passes():
            paused, in_flight = self._halt or self._stop_decoding()
            began = time.perf_counter()
            load()
            load_s = time.perf_counter() - began
            self._start_again()
            self._full = False
            self.sampler.version = version
            self._halt = None
        self._news.set()
        return time.perf_counter() - paused, load_s, in_flight

    def _stop_decoding(self) -> tuple[float, int]:
        """(now, requests that will continue)"""
        now = time.perf_counter()
        self._receive()
        if self._config.pause != "abort":
            return now, len(self._running)
        # Those that have begun end with what they have; `collect` hands it on.
        self._end_early([*self._running, *(row for row in self._waiting if row.record.samples)])
        return now, 0

    def _turn_away(self) -> None:
        self._receive()
        if self._running or self._waiting:
            self._end_early([*self._running, *self._waiting])
        self.cache.clear()

    @torch.inference_mode()
    def _end_early(self, rows: list[Row]) -> None:
        for row in rows:
            self.cache.drop(row)
            row.finish_reason = "abort"
        self._running.clear()
        self._waiting = deque(row for row in self._waiting if not row.finish_reason)
        self._full = False
        self._on_finish()

    @torch.inference_mode()
    def _start_again(self) -> None:
        """No KV of the old weights is left, but of the requests that continue with theirs (`keep`)."""
        self.cache.forget_prefixes()
        every = self._config.pause == "recompute"
        for row in reversed([row for row in self._running if every or not row.record.samples]):
            self._put_back(row)

    # the decoding thread -------------------------------------------------------------------------------------------
    @torch.inference_mode()
    def _decode(self) -> bool:
        with self._turn:
            self._turn.wait_for(lambda: not self._swaps_waiting, timeout=self._config.request_timeout_s)
            if self._asleep:
                self._turn_away()
                return False
            self._receive()
            if self._halt is not None:
                return False
            self._admit()
            self._choose()
            step = ForwardStep(self.cache)
            if not step.ids:
                return False
            sampling = [row for row in step.rows if row.new == row.left]
            logits = self._forward(step, sampling)
            self.steps += 1
            self._fed(step)
            for row in sampling:
                _keep_experts(row)
            if sampling:
                self._sampled(sampling, self.sampler.draw(logits, [row.record for row in sampling]).tolist())
            return True

    def _forward(self, step: ForwardStep, sampling: list[Row]) -> torch.Tensor:
        with self.adapters.on(step) if self.adapters else nullcontext():
            return self._recorded(step, sampling)

    def _recorded(self, step: ForwardStep, sampling: list[Row]) -> torch.Tensor:
        if self.routers is None:
            return forward(self._model, step, sampling)
        with self.routers.recorded() as records:
            logits = forward(self._model, step, sampling)
        experts, start = self.routers.rows(records), 0
        for row in step.rows:
            assert row.experts is not None
            row.experts[row.fed : row.fed + row.new] = experts[start : start + row.new]
            start += row.new
        return logits

    @torch.inference_mode()
    def _receive(self) -> None:
        """Moves new requests to the waiting ones and drops cancelled ones."""
        # Read before what arrived: a request is added before it is cancelled, so none is overlooked. Written only if it
        # is set: the event loop may set it between the two.
        if cancelled := self._any_cancelled:
            self._any_cancelled = False
        while self._arrived:
            self._waiting.append(self._arrived.popleft())
        if cancelled:
            self._waiting = deque(row for row in self._waiting if not row.cancelled)
            for row in [row for row in self._running if row.cancelled]:
                self._end(row)

    def _admit(self) -> None:
        """Start those that wait, in order, while there is room.

        A prompt whose pages are being computed for another request waits for them: those of a group are computed once.
        """
        if not self._waiting or (self._full and self._running):
            return
        computing = {_pages(row) for row in self._running if row.left > 1}
        held_up: list[Row] = []
        while self._waiting and len(self._running) < self._config.max_concurrent:
            row = self._waiting.popleft()
            pages = _pages(row)
            if pages[1] and pages in computing:
                held_up.append(row)
            elif self.cache.start(row):
                self._running.append(row)
                computing.add(pages)
            else:
                self._waiting.appendleft(row)
                break
        self._waiting.extendleft(reversed(held_up))

    def _choose(self) -> None:
        """Set `new` of each running request: what the pass computes of it. Puts back those without room."""
        room = self._step_tokens - sum(row.left == 1 for row in self._running)
        for row in list(self._running):
            if row.bucket is None:
                continue  # put back for one before it
            remaining = row.left
            row.new = 1 if remaining == 1 else min(remaining, room)
            if remaining > 1:
                room -= row.new
            if row.fed + row.new > row.bucket.capacity:
                self._make_room(row)

    def _make_room(self, row: Row) -> None:
        """Make room for a row's new tokens. Others are put back for it, the newest first; the row itself if it is the
        newest.
        """
        if not self.cache.grow(row, row.fed + row.new, lambda: self._make_way(row)):
            self._put_back(row)
            self._full = True

    def _make_way(self, row: Row) -> bool:
        newest = self._running[-1]
        if newest is row:
            return False
        self._put_back(newest)
        self._full = True
        return True

    def _put_back(self, row: Row) -> None:
        self.cache.drop(row)
        row.new = 0
        self._running.remove(row)
        self._waiting.appendleft(row)

    def _fed(self, step: ForwardStep) -> None:
        for row in step.rows:
            row.fed += row.new
            if row.fed == row.record.context_len and row.reused < row.fed // PAGE_TOKENS * PAGE_TOKENS:
                self.cache.keep_prefix(row)

    def _sampled(self, rows: list[Row], tokens: list[int]) -> None:
        ended = False
        for row, token in zip(rows, tokens, strict=True):
            row.ids.append(token)
            sampling = row.record.sampling
            if token in sampling.stop_token_ids:
                row.finish_reason = "stop"
            elif len(row.record.samples) >= sampling.max_new_tokens:
                row.finish_reason = "length"
            else:
                continue
            self.cache.keep_prefix(row)
            self._end(row)
            ended = True
        if ended:
            self._on_finish()

    def _end(self, row: Row) -> None:
        self.cache.drop(row)
        self._running.remove(row)
        self._full = False


def _keep_experts(row: Row) -> None:
    """Adds to its record the experts of all positions up to the pass that samples its next token."""
    record = row.record
    if record.routed_from is None or row.experts is None:
        return
    # Its last sample's pass was that of the token before it.
    done = record.context_len + len(record.samples) - 1 if record.samples else record.routed_from
    record.routed.append(row.experts[done : row.fed].copy())


def _pages(row: Row) -> tuple[str | None, tuple[int, ...]]:
    """The row's adapter, and the ids of its whole pages."""
    return row.adapter, tuple(row.ids[: len(row.ids) // PAGE_TOKENS * PAGE_TOKENS])
