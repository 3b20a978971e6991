"""Redis's own clock as the queue's functions read it, moved by a key: for all processes of a stage alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

from penstock.transfer_queue.redis.scripts import library

READS_TIME = "local time = call('TIME')"
STEP_KEY = "test_step_s"
"""Behind the prefix of the run's index keys: by how many seconds Redis's clock is wrong."""


@contextmanager
def movable_redis_clock(*, enabled: bool = True) -> Iterator[None]:
    """Connections that are opened inside load the queue's functions with one line changed."""
    if not enabled:
        yield
        return
    known = library()
    assert READS_TIME in known.source
    moved = f"{READS_TIME} time[1] = time[1] + tonumber(call('GET', PREFIX .. '{STEP_KEY}') or 0)"
    name = known.name + "_moved"
    made = replace(known, name=name, source=known.source.replace(known.name, name).replace(READS_TIME, moved))
    with patch("penstock.transfer_queue.redis.client.library", return_value=made):
        yield
