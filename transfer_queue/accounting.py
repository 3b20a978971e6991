"""What things cost in the store, in bytes: Redis's own allocation sizes and bookkeeping, so that `Status.bytes` is what
the operator sees in Redis.

The constants are those of Redis 7 on a 64-bit machine with jemalloc; a test compares the sum with a real server.
"""

from __future__ import annotations

CHUNK_BYTES = (1 << 20) - 64
"""Longer payloads are stored in pieces of this size: with Redis's header a piece fills 1 MiB of its allocator."""
STRING_HEADER = 12
"""sds header and end of a long string, and the two bytes that Redis keeps of the protocol."""
KEY_COST = 110
"""A key: its name, its entry in the key space, its value object."""
GROUP_COST = 350
"""A group's hash and key, its key's share of the key space, and its place in one sorted set."""
MEMBER_COST = 300
"""An episode's fields in the group's hash and its place in one sorted set."""
ENTRY_COST = 240
"""One field of a journal's hash."""


def allocated(size: int) -> int:
    """`size` rounded up to the allocator's next size class: multiples of 16 up to 128, then four per doubling."""
    if size <= 128:
        return max(16, -(-size // 16) * 16)
    step = 1 << ((size - 1).bit_length() - 3)
    return -(-size // step) * step


def payload_cost(size: int) -> int:
    whole, rest = divmod(size, CHUNK_BYTES)
    return whole * ((1 << 20) + KEY_COST) + (allocated(rest + STRING_HEADER) + KEY_COST if rest else 0)


def journal_cost(size: int) -> int:
    return allocated(size + STRING_HEADER) + ENTRY_COST


def task_cost(size: int) -> int:
    """A task's own bytes and its group; its episodes cost `MEMBER_COST` each on top."""
    return allocated(size + STRING_HEADER) + KEY_COST + GROUP_COST
