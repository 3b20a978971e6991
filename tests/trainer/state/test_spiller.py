"""One step after the other, only after its version is out, and no failure goes unheard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from trainer_support import make_job, make_trajectory

from penstock.trainer import StepBatch
from penstock.trainer.state.saver import Spiller


class Out:
    """The publisher's side: versions that are out."""

    def __init__(self) -> None:
        self.version = 0
        self._changed = asyncio.Condition()

    async def until_published(self, version: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.version >= version)

    async def publish(self, version: int) -> None:
        async with self._changed:
            self.version = version
            self._changed.notify_all()


class SpillLog:
    """The queue's side: what was spilled, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, list[str]]] = []
        self.waits: list[tuple[str, str]] = []
        self.failure: Exception | None = None

    async def spill(self, step: int, episode_ids: Sequence[str]) -> int:
        if self.failure is not None:
            raise self.failure
        self.calls.append((step, list(episode_ids)))
        return len(episode_ids)

    async def add_wait(self, role: str, cause: str, seconds: float) -> None:
        assert seconds >= 0
        self.waits.append((role, cause))


def share(step: int) -> StepBatch:
    """Of two groups this rank has one."""
    mine = [make_trajectory(f"train/{step}", member, step) for member in range(2)]
    groups = [[f"other/{step}#0"], [t.episode_id for t in mine]]
    return StepBatch(step, groups, mine, np.array([1, 1]), [])


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., tuple[Spiller, SpillLog, Out]]:
    def made(first: bool = True, **changes: Any) -> tuple[Spiller, SpillLog, Out]:
        queue, out = SpillLog(), Out()
        job = make_job(tmp_path, "none", queue=queue, **{"spill": True, **changes})
        return Spiller(job, out, first), queue, out  # type: ignore[arg-type]

    return made


async def test_a_share_is_spilled_once_its_version_is_out_and_steps_keep_their_order(make) -> None:
    spiller, queue, out = make()
    await spiller.begin(share(0))
    second = asyncio.create_task(spiller.begin(share(1)))
    await asyncio.sleep(0)
    assert queue.calls == []
    await out.publish(1)
    await asyncio.wait_for(second, 60)
    assert queue.calls == [(0, ["train/0#0", "train/0#1"])]
    await out.publish(2)
    await asyncio.wait_for(spiller.settle(), 60)
    assert queue.calls[1:] == [(1, ["train/1#0", "train/1#1"])]
    assert queue.waits == [("trainer", "spill")] * 2
    await spiller.settle()
    assert len(queue.waits) == 2


@pytest.mark.parametrize("call", ["begin", "settle"])
async def test_a_failure_is_raised_at_the_next_call_and_not_again(make, call: str) -> None:
    spiller, queue, out = make()
    await out.publish(9)
    queue.failure = OSError(28, "No space left on device")
    await spiller.begin(share(0))
    with pytest.raises(OSError, match="No space left"):
        await (spiller.begin(share(1)) if call == "begin" else spiller.settle())
    queue.failure = None
    await spiller.begin(share(0))
    await spiller.settle()
    assert [step for step, _ in queue.calls] == [0]


async def test_a_version_that_never_comes_out_is_an_error(make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.trainer.state.saver.SPILL_TIMEOUT_S", 0.0)
    spiller, _, _ = make()
    await spiller.begin(share(0))
    with pytest.raises(TimeoutError):
        await spiller.settle()


async def test_close_ends_what_is_under_way(make) -> None:
    spiller, queue, out = make()
    await spiller.close()
    await spiller.begin(share(0))
    await asyncio.wait_for(spiller.close(), 60)
    await out.publish(1)
    await asyncio.sleep(0)
    assert queue.calls == []


async def test_without_the_setting_nothing_is_spilled(make) -> None:
    spiller, queue, out = make(spill=False)
    await out.publish(1)
    await spiller.begin(share(0))
    await spiller.settle()
    assert (queue.calls, queue.waits) == ([], [])


async def test_only_the_first_rank_counts_the_wait(make) -> None:
    spiller, queue, out = make(first=False)
    await out.publish(1)
    await spiller.begin(share(0))
    await spiller.settle()
    assert (len(queue.calls), queue.waits) == (1, [])
