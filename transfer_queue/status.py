"""A run's status, named from what ``lua/status.lua`` returns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from penstock.transfer_queue.ledger import Status

_GROUPS = ("admitted", "ready", "shipped", "trained", "committed", "dropped_over_age", "dead")
_EPISODES = {
    "completed": "completed",
    "failed": "failed",
    "retried": "retried",
    "expired": "expired",
    "trained": "trained",
    "committed_episodes": "committed",
    "dropped": "dropped",
}


def status_from(
    meta: Sequence[bytes],
    queued_groups: int,
    open_episodes: int,
    leased: int,
    workers: Sequence[bytes],
    waits: Sequence[bytes],
    lanes: Sequence[tuple[bytes, int, int, int]],
) -> Status:
    counts = {name: value for name, value in _pairs(meta).items() if name not in ("config", "manifest", "overage")}

    def number(name: str) -> int:
        return int(counts.get(name, 0))

    return Status(
        version=number("version"),
        step=number("next_step"),
        committed_step=number("committed"),
        groups={"queued": queued_groups, **{name: number(f"groups_{name}") for name in _GROUPS}},
        episodes={
            "queued": open_episodes,
            "leased": leased,
            **{shown: number(stored) for stored, shown in _EPISODES.items()},
        },
        bytes=number("bytes"),
        waits_s={name: float(value) for name, value in _pairs(waits).items()},
        workers=dict(Counter(worker.decode() for worker in workers)),
        other_lanes={
            lane.decode(): {"queued": queued, "leased": out, "done": done} for lane, queued, out, done in lanes
        },
    )


def _pairs(flat: Sequence[bytes]) -> dict[str, bytes]:
    return {name.decode(): value for name, value in zip(flat[::2], flat[1::2], strict=True)}
