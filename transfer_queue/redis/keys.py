"""Names of the queue's keys in Redis.

    penstock:{RUN}:run                   hash: identity, limits, configuration. The prefix alone is KEYS[1] of a script
    penstock:{RUN}:clock                 hash: the queue's clock, and Redis's when it was kept
    penstock:{RUN}:head                  hash: the process that owns the run, and until when
    penstock:{RUN}:turns                 hash: holder → packed entry, of devices that engines and trainer share
    penstock:{RUN}:steps                 hash: version, next and committed step, announcement, batch:STEP → groups
    penstock:{RUN}:counters, counts      hashes: bytes, fences, the cursor; what ever happened
    penstock:{RUN}:reserved              sorted set: payloads that a writer stores in a cluster, by the time
    penstock:{RUN}:queue[:SOURCE], admitted, ready, open:train, open:other, leases, letters   sorted sets
    penstock:{RUN}:ledger                sorted set: reports of usage and fates of episodes, by number, see `ledger`
    penstock:{RUN}:group:TASK_ID         hash: a group and its members
    penstock:{RUN}:task:TASK_ID          string: its packed task
    penstock:{RUN}:journal:EPISODE       hash: position → position and packed entry
    penstock:payload:RUN:EPISODE@FENCE.NONCE   string: a packed trajectory, see `payloads`

Index keys share the hash tag ``{RUN}``, so that a script may touch all of them in a Redis Cluster; payloads do not, so
that they may spread. Fence and nonce of the completion in a payload's name keep another writer from changing what was
acknowledged.

What is in them, and how it changes: ``lua/``, see `scripts`.
"""

from __future__ import annotations

import re

from penstock.transfer_queue.errors import QueueError


class Keys:
    """Key names of one run. Raises `QueueError` for a name that could escape its own keys."""

    def __init__(self, run: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", run):
            raise QueueError(f"run name {run!r}: letters, digits, '.', '_' and '-' only, at most 64")
        self.index = f"penstock:{{{run}}}:"
        self.run = self.index + "run"
        self.steps = self.index + "steps"
        self.counters = self.index + "counters"
        self.garbage = self.index + "garbage"
        self.proven = self.index + "proven"
        self.ledger = self.index + "ledger"
        self.updates = self.index + "updates"
        self.turn_reports = self.index + "turn_reports"
        self._payload = f"penstock:payload:{run}:"

    def payload(self, name: str, piece: int = 0) -> str:
        """`name` is ``EPISODE@FENCE.NONCE``."""
        return f"{self._payload}{name}/{piece}" if piece else self._payload + name

    def patterns(self) -> list[str]:
        """Glob patterns of everything that belongs to the run (names hold no glob characters)."""
        return [self.index + "*", self._payload + "*"]


LAYOUT = "3"
"""Version of the names and contents of a run's keys; a run with another one is refused.

1 had no such field; 2 had groups of one size."""
