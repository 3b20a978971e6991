"""The KV cache of transformers' continuous batching: what is reused of it, and what a swap of weights does to it.

All but `Reused` is to be called only while decoding is paused.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any


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
        queue = allocator.queue
        cache.pool.free_blocks(allocator.index, queue.evict_cached_blocks())
        queue.hash_to_block.clear()
        queue.block_to_hash.clear()
        for block in {block for table in allocator.block_table.values() for block in table}:
            mark = secrets.randbits(64)
            queue.hash_to_block[mark] = block
            queue.block_to_hash[block] = mark


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
