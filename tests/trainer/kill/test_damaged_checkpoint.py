"""A checkpoint damaged between two lives of a trainer: the one before is used, aloud, and nothing is lost by it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kill_stage import STEPS, KilledRun, Nursery

pytestmark = [
    pytest.mark.deep,
    pytest.mark.redis,
    pytest.mark.torch,
    pytest.mark.crash,
    pytest.mark.asyncio(loop_scope="session"),
]


def cut(checkpoint: Path) -> str:
    """As a disk that was full when the last page was written."""
    shard = checkpoint / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-4096])
    return "__0_0.distcp differs from its checksum"


def flip(checkpoint: Path) -> str:
    shard = checkpoint / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[2 * len(data) // 3] ^= 4
    shard.write_bytes(data)
    return "__0_0.distcp differs from its checksum"


def lose(checkpoint: Path) -> str:
    """The folder's name reached the disk and a file in it did not."""
    (checkpoint / ".metadata").unlink()
    return "No such file or directory"


@pytest.mark.parametrize("damage", [cut, flip, lose])
async def test_the_one_before_is_used_aloud(
    make: Callable[[str], KilledRun], nursery: Nursery, reference: dict[str, Any], damage: Callable[[Path], str]
) -> None:
    """Killed before the commit of its second checkpoint: the queue still has what was trained since the first."""
    run = make(damage.__name__)
    begun_and_twice_saved = 3
    async with run.worker():
        assert await run.live(nursery, "before_commit", begun_and_twice_saved) < 0
        cause = damage(run.root / "checkpoints" / "step_00000006")
        assert await run.live(nursery) == 0
    await run.check(reference, damaged=1)
    said = [line for line in run.log().splitlines() if "step_00000006 is damaged" in line]
    assert len(said) == 1
    assert cause in said[0]
    assert "taking the one before" in said[0]
    lines = [json.loads(line) for line in (run.root / "metrics.jsonl").read_text().splitlines()]
    assert [line["checkpoints_damaged"] for line in lines] == [0] * 3 + [1] * (STEPS - 3)
