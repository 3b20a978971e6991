"""Numbers of a run: `Status` as Prometheus metrics, memory accounting, and response lengths.

`payload_cost`, `journal_cost` and `task_cost` reproduce what Redis allocates, so that `Status.bytes` matches Redis's
own figure. The constants are those of Redis 7 on a 64-bit machine with jemalloc; a test compares the sum with a real
server.

`bucket_of` and `deciles` count finished and over-age episodes by response length: they show whether the staleness
bound discards mostly long episodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.common import counter_family, gauge_family, prometheus
from penstock.transfer_queue.status import LengthDecile, Status
from penstock.transfer_queue.types import ServerInfo

PREFIX = "penstock_queue_"


class QueueGauges(Collector):
    """Prometheus collector of the status that `newest` returns; empty while that is None."""

    def __init__(
        self, run: str, newest: Callable[[], Status | None], servers: Callable[[], Sequence[ServerInfo]] = tuple
    ) -> None:
        self._run = run
        self._newest = newest
        self._servers = servers

    def collect(self) -> Iterator[Metric]:
        status = self._newest()
        if status is None:
            return
        yield self._single("version", "Current policy version", status.version)
        yield self._single("step", "Next step to be leased", status.step)
        yield self._single("committed_step", "Steps below this are durable", status.committed_step)
        yield self._single("bytes", "Bytes that the run holds in the store", status.bytes)
        yield self._single("unconsumed_bytes", "Bytes that hold admission back", status.unconsumed_bytes)
        yield self._by("groups", "Groups by state", "state", status.groups)
        yield self._by("episodes", "Episodes by state, or ever", "state", status.episodes)
        yield self._by("age_seconds", "Age in its state of the group that is first there", "state", status.ages_s)
        waited = [((self._run, waiter), seconds) for waiter, seconds in sorted(status.waits_s.items())]
        yield counter_family(PREFIX + "waited_seconds", "By role and cause", ["run", "waiter"], waited)
        yield self._by("worker_episodes", "Episodes that a worker holds", "worker", status.workers)
        text = "Share of over-age episodes by decile of response length, shortest first"
        shares = [
            ((self._run, str(number)), row.over_age / row.episodes if row.episodes else 0.0)
            for number, row in enumerate(status.over_age, start=1)
        ]
        yield gauge_family(PREFIX + "over_age_share", text, ["run", "decile"], shares)
        text = "Versions that a rollout server is behind the newest one"
        yield self._by("server_version_lag", text, "server", version_lags(status, self._servers()))

    def _single(self, name: str, text: str, value: float) -> Metric:
        return gauge_family(PREFIX + name, text, ["run"], {self._run: value})

    def _by(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        rows = [((self._run, key), value) for key, value in sorted(values.items())]
        return gauge_family(PREFIX + name, text, ["run", label], rows)


def version_lags(status: Status, servers: Sequence[ServerInfo]) -> dict[str, int]:
    """Server id → number of versions behind the newest, ordered by id."""
    return {s.server_id: max(0, status.version - s.version) for s in sorted(servers, key=lambda s: s.server_id)}


def exposition(run: str, status: Status, servers: Sequence[ServerInfo] = ()) -> bytes:
    """The gauges in Prometheus's text format."""
    return prometheus.exposition(QueueGauges(run, lambda: status, lambda: servers))


CHUNK_BYTES = (1 << 20) - 64
"""Longer payloads are stored in pieces of this size: with Redis's header a piece fills 1 MiB of its allocator."""
STRING_HEADER = 12
"""sds header and end of a long string, and the two bytes that Redis keeps of the protocol."""
KEY_COST = 110
"""A key: its name, its entry in the key space, its value object."""
MEMBER_COST = 300
"""An episode's fields in the group's hash and its place in one sorted set."""


def allocated(size: int) -> int:
    """`size` rounded up to the allocator's next size class: multiples of 16 up to 128, then four per doubling."""
    if size <= 128:
        return -(-size // 16) * 16
    step = 1 << ((size - 1).bit_length() - 3)
    return -(-size // step) * step


def payload_cost(size: int) -> int:
    whole, rest = divmod(size, CHUNK_BYTES)
    return whole * ((1 << 20) + KEY_COST) + (allocated(rest + STRING_HEADER) + KEY_COST if rest else 0)


def journal_cost(size: int) -> int:
    return allocated(size + STRING_HEADER) + 240  # for one field of a journal's hash


def task_cost(size: int) -> int:
    """A task's own bytes and its group; its episodes cost `MEMBER_COST` each on top."""
    # 350 for a group's hash and key, its key's share of the key space, and its place in one sorted set.
    return allocated(size + STRING_HEADER) + KEY_COST + 350


PER_OCTAVE = 12
"""Buckets per doubling of the length; part `lengths` of `lua/shared_run.lua` mirrors `bucket_of`."""


def bucket_of(tokens: int) -> int:
    return math.floor(PER_OCTAVE * math.log(tokens + 1) / math.log(2) + 1e-9)


def longest_in(bucket: int) -> int:
    """Most tokens of a response in the bucket."""
    return math.ceil(2 ** ((bucket + 1) / PER_OCTAVE) - 1e-9) - 2


def deciles(finished: Mapping[int, int], over_age: Mapping[int, int]) -> list[LengthDecile]:
    """Ten rows, shortest first, from bucket → episodes; a bucket across a boundary is divided evenly."""
    total = sum(finished.values())
    if total == 0:
        return []
    rows = [_row(finished, over_age, total * i / 10, total * (i + 1) / 10) for i in range(10)]
    ends, over = ([round(sum(row[at] for row in rows[:count])) for count in range(11)] for at in (1, 2))
    return [
        LengthDecile(row[0], end - begin, more - less)
        for row, (begin, end), (less, more) in zip(rows, pairwise(ends), pairwise(over), strict=True)
    ]


def _row(finished: Mapping[int, int], over_age: Mapping[int, int], low: float, high: float) -> tuple[int, float, float]:
    """(longest response, episodes, over-age ones) between the `low`-th and the `high`-th shortest episode."""
    longest, episodes, over, at = 0, 0.0, 0.0, 0
    for bucket in sorted(finished):
        count = finished[bucket]
        share = max(0.0, min(high, at + count) - max(low, at))
        if share > 0:
            longest = longest_in(bucket)
            episodes += share
            over += over_age.get(bucket, 0) * share / count
        at += count
    return longest, episodes, over
