"""One step after the other, only after its version is out, and no failure goes unheard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest

pytest.importorskip("torch")

from trainer_support import make_job, make_trajectory

from penstock.trainer import StepBatch
from penstock.trainer.state.saver import Spiller
from penstock.transfer_queue import Archive, QueueError


def share(step: int) -> StepBatch:
    """Of two groups this rank has one."""
    mine = [make_trajectory(f"train/{step}", member, step) for member in range(2)]
    groups = [[f"other/{step}#0"], [t.episode_id for t in mine]]
    return StepBatch(step, groups, mine, np.array([1, 1]), [])


Made = tuple[Spiller, AsyncMock, Callable[[int], None]]


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Made]:
    """Makes a spiller, its queue, and what publishes all versions up to one."""

    def made(first: bool = True, **changes: Any) -> Made:
        queue, publisher, out = AsyncMock(), AsyncMock(), [asyncio.Event() for _ in range(10)]

        async def until_published(version: int) -> None:
            await out[version].wait()

        publisher.until_published = until_published
        job = make_job(tmp_path, "none", queue=queue, **{"archives": True, **changes})
        return Spiller(job, publisher, first), queue, lambda newest: [one.set() for one in out[: newest + 1]]

    return made


def steps(queue: AsyncMock) -> list[int]:
    return [call.args[0] for call in queue.spill.await_args_list]


async def test_a_share_is_spilled_once_its_version_is_out_and_steps_keep_their_order(make: Callable[..., Made]) -> None:
    spiller, queue, publish = make()
    await spiller.begin(share(0))
    second = asyncio.create_task(spiller.begin(share(1)))
    await asyncio.sleep(0)
    assert steps(queue) == []
    publish(1)
    await asyncio.wait_for(second, 60)
    queue.spill.assert_awaited_once_with(0, ["train/0#0", "train/0#1"])
    publish(2)
    await asyncio.wait_for(spiller.settle(), 60)
    queue.spill.assert_awaited_with(1, ["train/1#0", "train/1#1"])
    await spiller.settle()
    assert [call.args[:2] for call in queue.add_wait.await_args_list] == [("trainer", "spill")] * 2


@pytest.mark.parametrize("call", ["begin", "settle"])
async def test_a_failure_is_raised_at_the_next_call_and_not_again(make: Callable[..., Made], call: str) -> None:
    spiller, queue, publish = make()
    publish(9)
    queue.spill.side_effect = QueueError("not allowed")
    await spiller.begin(share(0))
    with pytest.raises(QueueError, match="not allowed"):
        await (spiller.begin(share(1)) if call == "begin" else spiller.settle())
    queue.spill.side_effect = None
    await spiller.begin(share(2))
    await spiller.settle()
    assert steps(queue) == [0, 2]


async def test_a_full_disk_ends_the_archive_and_not_the_run(
    make: Callable[..., Made], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Payloads that were not archived stay in the queue."""
    spiller, queue, publish = make()
    publish(9)
    await spiller.begin(share(0))
    await spiller.settle()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Archive, "append", full)
    await spiller.begin(share(1))
    await spiller.settle()
    monkeypatch.undo()
    await spiller.begin(share(2))
    await spiller.settle()
    assert steps(queue) == [0]
    assert Archive(tmp_path / "archive").steps() == [0]
    assert "step 1 is not archived" in caplog.text
    assert "No space left" in caplog.text


async def test_a_step_before_its_checkpoint_is_archived_and_not_freed(
    make: Callable[..., Made], tmp_path: Path
) -> None:
    """Its commit follows, and waits for the version."""
    spiller, queue, _ = make()
    await spiller.begin(share(0), frees=False)
    await asyncio.wait_for(spiller.settle(), 60)
    assert steps(queue) == []
    assert Archive(tmp_path / "archive").steps() == [0]


async def test_a_version_that_never_comes_out_is_an_error(
    make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.trainer.state.saver.SPILL_TIMEOUT_S", 0.0)
    spiller, _, _ = make()
    await spiller.begin(share(0))
    with pytest.raises(TimeoutError):
        await spiller.settle()


async def test_close_ends_what_is_under_way(make: Callable[..., Made]) -> None:
    spiller, queue, publish = make()
    await spiller.close()
    await spiller.begin(share(0))
    await asyncio.wait_for(spiller.close(), 60)
    publish(1)
    await asyncio.sleep(0)
    assert steps(queue) == []


@pytest.mark.parametrize(("settings", "spilled"), [({"archives": False}, []), ({"first": False}, [0])])
async def test_only_the_first_rank_counts_the_wait_and_without_the_setting_nothing_is_spilled(
    make: Callable[..., Made], settings: dict[str, Any], spilled: list[int]
) -> None:
    spiller, queue, publish = make(**settings)
    publish(1)
    await spiller.begin(share(0))
    await spiller.settle()
    assert steps(queue) == spilled
    queue.add_wait.assert_not_awaited()
