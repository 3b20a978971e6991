"""transformers' continuous batching as an engine needs it: requests in, recorded tokens out, weights swapped inside.

    event loop      add, cancel ──► manager's queues;  collect ◄── Record
    decoding thread schedule → forward → Sampler.draw → Record
    loader thread   swap ── pause ──► decoding thread parks between two steps ──► copy, check, version ──► resume

Batches are never pipelined (`use_async_batching=False`): when a pause is granted no step is under way, so every token
was sampled either wholly before or wholly after the swap.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.engines.hf_cache import (
    Reused,
    admit_again,
    cancel_running,
    forget_prefixes,
    recompute_running,
)
from penstock.rollout_server.engines.hf_live import Live, LiveRequests
from penstock.rollout_server.engines.hf_sampling import Record, Sampler
from penstock.rollout_server.protocol import Sampling

logger = logging.getLogger(__name__)
PAGE_TOKENS = 32
STEP_TOKENS = 256
"""Tokens of one forward pass: all that decode, filled up with prompts cut to fit."""


class Batcher(LiveRequests[Live]):
    """Owns the decoding thread. All methods but `swap` are for the event loop that made it."""

    def __init__(self, model: Any, config: RolloutConfig, seed: int, on_finish: Callable[[], None]) -> None:
        super().__init__(on_finish)
        self.sampler = Sampler(seed)
        self.steps = 0
        self._pause_mode = config.pause
        self._manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=True, eos_token_id=-1),
            continuous_batching_config=_batching_config(config, seed),
        )
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

    def _record_of(self, name: str) -> Record:
        live = self._live.get(name)
        return live.record if live else Record(Sampling(), 0)

    def add(self, name: str, token_ids: list[int], sampling: Sampling) -> None:
        """Queue a request; its tokens come out of `collect`."""
        self._live[name] = Live(Record(sampling, len(token_ids)))
        self._manager.register_result_handler(name, self._finished)
        stops = list(sampling.stop_token_ids) or [-1]
        self._manager.add_request(
            token_ids, request_id=name, max_new_tokens=sampling.max_new_tokens, eos_token_id=stops
        )

    def cancel(self, name: str) -> None:
        """Free the request's place and KV before the next step. Unknown names are fine."""
        if self._live.pop(name, None) is None:
            return
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
