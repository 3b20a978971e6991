"""What a swap of weights does to the KV cache of transformers' continuous batching. Call only while it is paused."""

from __future__ import annotations

import secrets
from typing import Any


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
