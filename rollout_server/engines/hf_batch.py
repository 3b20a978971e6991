"""transformers' continuous batching as an engine needs it: requests in, recorded tokens out, weights swapped inside.

    event loop      add, cancel ──► manager's queues;  collect ◄── Record
    decoding thread schedule → forward → Sampler.draw → Record
    loader thread   swap ── pause ──► decoding thread parks between two steps ──► copy, check, version ──► resume

Batches are never pipelined (`use_async_batching=False`): when a pause is granted no step is under way, so every token
was sampled either wholly before or wholly after the swap.

The functions on the KV cache, all but `Reused`, may be called only while decoding is paused.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.engines.hf_sampling import Live, LiveRequests, Record, Sampler
from penstock.rollout_server.protocol import Chunk, Sampling

logger = logging.getLogger(__name__)
PAGE_TOKENS = 16
"""Prefixes are found again by whole pages: half a page of every prompt is computed once more."""
STEP_TOKENS = 256
"""Tokens of one forward pass: all that decode, filled up with prompts cut to fit."""


class Reused:
    """Counts the prompt tokens whose KV was there already."""

    def __init__(self, cache: Any) -> None:
        self.tokens = 0
        self._search = cache.search_prefix_match
        cache.search_prefix_match = self._search_and_count

    def _search_and_count(self, request_id: str, prompt_ids: list[int]) -> int:
        found: int = self._search(request_id, prompt_ids)
        self.tokens += found
        return found


def forget_prefixes(cache: Any) -> None:
    """No request that starts from now on is given KV that was computed before now.

    Blocks that running requests hold stay theirs, under random 64-bit hashes: hashes chain, so whatever these requests
    complete later matches no prompt either. Without it a new answer would mix old KV with new weights.
    """
    for allocator in cache.cache_allocators.values():
        ledger = allocator.ledger
        cache.pool.free_blocks(allocator.index, ledger.evict_cached_blocks())
        ledger.hash_to_block.clear()
        ledger.block_to_hash.clear()
        for block in {block for table in allocator.block_table.values() for block in table}:
            mark = secrets.randbits(64)
            ledger.hash_to_block[mark] = block
            ledger.block_to_hash[block] = mark


def recompute_running(processor: Any) -> None:
    """Running requests lose their KV and are prefilled again, what they sampled kept, before any that wait."""
    scheduler, again = processor.scheduler, []
    for state in list(scheduler.active_requests.values()):
        processor.cache.free_blocks(state.request_id, no_cache=True)
        again.append(state.create_equivalent_initial_request())
        scheduler.finish_request(state.request_id)
    for state in again:
        scheduler.add_waiting_request(state)
    scheduler.waiting_requests_order.rotate(len(again))


def cancel_running(processor: Any, sampled: Callable[[str], bool]) -> list[str]:
    """Names of the requests that hold KV or have `sampled`, cancelled before the next step. Others wait on."""
    scheduler = processor.scheduler
    names = [*scheduler.active_requests, *filter(sampled, scheduler.waiting_requests)]
    for name in names:
        scheduler.set_request_cancellation(name)
    admit_again(scheduler)
    return names


def admit_again(scheduler: Any) -> None:
    """The block is set when requests were put back for want of KV and lifted by one that finishes; none may be left."""
    scheduler.block_new_requests = False


class Batcher(LiveRequests[Live]):
    """Owns the decoding thread. All methods but `swap` are for the event loop that made it."""

    def __init__(self, model: Any, config: RolloutConfig, seed: int, on_finish: Callable[[], None]) -> None:
        super().__init__(on_finish)
        self.sampler = Sampler(seed)
        self.steps = 0
        self._computing: dict[tuple[int, ...], str] = {}
        """Whole pages of a prompt → the request that computes them."""
        self._waiting: dict[str, tuple[str, list[int], Sampling]] = {}
        """Requests that start when another one, the first, has computed the pages of their common prompt."""
        self._pause_mode = config.pause
        self._manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=True, eos_token_id=-1),
            continuous_batching_config=_batching_config(config, seed),
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._manager.warmup()
        self._processor = self._manager.batch_processor
        self.reused = Reused(self._processor.cache)
        self._take_over_sampling()
        self._manager.start()

    def _take_over_sampling(self) -> None:
        runner = self._processor.model_runner
        if not callable(getattr(runner, "_sample", None)):
            raise RuntimeError("this transformers samples elsewhere: the hf engine is written for 5.19's ModelRunner")
        runner._sample = self._sample

    def _sample(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        """In the decoding thread: scores [1, rows, V] → output_ids[0, :R]; rows past R belong to no request."""
        batch = self._processor.inputs_and_outputs.requests_in_batch
        names = [future.state.request_id for future in batch if future.has_new_token]
        self.steps += 1
        if names:
            records = [self._record_of(name) for name in names]
            output_ids[0, : len(names)] = self.sampler.draw(scores[0, : len(names)], records)
            if self._waiting and self._loop is not None:
                self._loop.call_soon_threadsafe(self._start_waiting)

    def _record_of(self, name: str) -> Record:
        live = self._live.get(name)
        return live.record if live else Record(Sampling(), 0)

    def add(self, name: str, token_ids: list[int], sampling: Sampling) -> None:
        """Queue a request; its tokens come out of `collect`.

        A prompt whose pages are being computed for another request waits for them: those of a group are computed once.
        """
        self._loop = asyncio.get_running_loop()
        self._live[name] = Live(Record(sampling, len(token_ids)))
        self._admit(name, token_ids, sampling)

    def _admit(self, name: str, token_ids: list[int], sampling: Sampling) -> None:
        pages = tuple(token_ids[: len(token_ids) // PAGE_TOKENS * PAGE_TOKENS])
        first = self._computing.get(pages)
        if first is not None and self._computes(first):
            self._waiting[name] = (first, token_ids, sampling)
            return
        if pages:
            self._computing[pages] = name
        self._start(name, token_ids, sampling)

    def _computes(self, name: str) -> bool:
        """The request is not yet through its prompt."""
        live = self._live.get(name)
        return live is not None and not (live.record.samples or live.finish_reason or live.error)

    def _start_waiting(self) -> None:
        """Start those whose first request has sampled a token; where it ended before that, one of them is the first."""
        self._computing = {pages: name for pages, name in self._computing.items() if self._computes(name)}
        for name, (first, token_ids, sampling) in list(self._waiting.items()):
            if self._computes(first):
                continue
            del self._waiting[name]
            if self._record_of(first).samples:
                self._start(name, token_ids, sampling)
            else:
                self._admit(name, token_ids, sampling)

    def collect(self, *, only_ended: bool = False) -> list[tuple[str, Chunk | str]]:
        """As `LiveRequests.collect`."""
        self._start_waiting()  # before those that ended are forgotten
        return super().collect(only_ended=only_ended)

    def _start(self, name: str, token_ids: list[int], sampling: Sampling) -> None:
        self._manager.register_result_handler(name, self._finished)
        stops = list(sampling.stop_token_ids) or [-1]
        self._manager.add_request(
            token_ids, request_id=name, max_new_tokens=sampling.max_new_tokens, eos_token_id=stops
        )

    def cancel(self, name: str) -> None:
        """Free the request's place and KV before the next step. Unknown names are fine."""
        if self._live.pop(name, None) is None or self._waiting.pop(name, None) is not None:
            return
        self._start_waiting()
        self._manager.output_router.result_handlers.pop(name, None)
        self._manager.cancel_request(name)
        admit_again(self._processor.scheduler)

    def _finished(self, output: Any) -> None:
        live = self._live.get(output.request_id)
        if live is None:
            return
        recorded = [token for token, _ in live.record.samples]
        live.error = output.error
        if live.error is None and recorded != list(output.generated_tokens):
            live.error = "the tokens recorded are not the tokens decoded"
        stops = live.record.sampling.stop_token_ids
        live.finish_reason = "stop" if recorded and recorded[-1] in stops else "length"
        self._on_finish()

    def stop(self) -> None:
        """End the decoding thread; what is in flight is dropped."""
        self._manager.stop(block=True, timeout=10.0, hard_stop=True)

    def fatal_error(self) -> str | None:
        """Why the decoding thread is gone; None while it runs."""
        if self._manager.is_running():
            return None
        return str(self._manager.background_thread_status.fatal_error or "the decoding thread ended")

    @property
    def kv_blocks_in_use(self) -> int:
        """Blocks that requests hold; those kept only for their prefixes do not count."""
        tables = [a.block_table for a in self._processor.cache.cache_allocators.values()]
        return sum(len(blocks) for table in tables for blocks in table.values())

    def swap(self, load: Callable[[], None], version: int) -> tuple[float, float, int]:
        """Between two steps: `load()`, then `version` names the weights. Returns (pause_s, load_s, in_flight).

        To be called from another thread than the event loop's: it waits for the step under way.
        """
        with self._manager.pause():
            paused = time.perf_counter()
            if self._pause_mode == "abort":
                self._abort_running()
            in_flight = 0 if self._pause_mode == "abort" else len(self._processor.scheduler.active_requests)
            load()
            load_s = time.perf_counter() - paused
            if self._pause_mode == "recompute":
                recompute_running(self._processor)
            forget_prefixes(self._processor.cache)
            self.sampler.version = version
        return time.perf_counter() - paused, load_s, in_flight

    def _abort_running(self) -> None:
        """Their answers end with what they have; `collect` hands it on."""
        for name in cancel_running(self._processor, lambda name: bool(self._record_of(name).samples)):
            self._manager.output_router.result_handlers.pop(name, None)
            if live := self._live.get(name):
                live.finish_reason = "abort"


def _batching_config(config: RolloutConfig, seed: int) -> ContinuousBatchingConfig:
    if config.kv_cache_tokens < config.max_model_len + PAGE_TOKENS:
        raise ValueError(
            f"rollout.kv_cache_tokens is {config.kv_cache_tokens}: one request of rollout.max_model_len"
            f" {config.max_model_len} needs {config.max_model_len + PAGE_TOKENS}"
        )
    return ContinuousBatchingConfig(
        page_size=PAGE_TOKENS,
        num_blocks=-(-config.kv_cache_tokens // PAGE_TOKENS),
        max_batch_tokens=max(STEP_TOKENS, 2 * config.max_concurrent),
        max_requests_per_batch=config.max_concurrent,
        allow_block_sharing=True,
        use_async_batching=False,
        use_cuda_graph=False,
        auto_switch_to_flash=False,
        seed=seed,
    )
