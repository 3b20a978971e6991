"""kill -9 in the middle of an append: what was said to be durable is there, and of the rest nothing or all."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from penstock.transfer_queue import BatchLog

pytestmark = pytest.mark.crash
SOURCE = Path(__file__).parents[2] / "src"

WRITER = """
import sys
from pathlib import Path
from penstock.transfer_queue import BatchLog

log, step = BatchLog(Path(sys.argv[1])), int(sys.argv[2])
while True:
    log.append(step, {f"{step}#{n}": bytes([step % 256, n]) * 300_000 for n in range(4)}, "writer")
    print(step, flush=True)
    step += 1
"""


def write_until_killed(folder: Path, first: int, chance: random.Random) -> int:
    """Runs a writer from step `first`, kills it some appends later in the midst of one; returns the acknowledged."""
    command = [sys.executable, "-c", WRITER, str(folder), str(first)]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(chance.randrange(1, 5))]
        timer = threading.Timer(chance.uniform(0.0, 0.02), process.kill)
        timer.start()
        said += process.stdout.readlines()
        timer.join()
    assert process.returncode == -9
    return int(said[-1])


def check(log: BatchLog, step: int) -> None:
    expected = {f"{step}#{n}": bytes([step % 256, n]) * 300_000 for n in range(4)}
    assert log.read(step, expected) == expected
    assert log.read(None, expected) == expected


def test_a_writer_killed_again_and_again(tmp_path: Path) -> None:
    seed = int(os.environ.get("PENSTOCK_TEST_SEED", random.randrange(10**6)))
    kills = int(os.environ.get("PENSTOCK_TEST_KILLS", "6"))
    print(f"PENSTOCK_TEST_SEED={seed}")
    chance, log, first, half_files = random.Random(seed), BatchLog(tmp_path / "batches"), 0, 0
    for _ in range(kills):
        acknowledged = write_until_killed(log.folder, first, chance)
        half_files += len(list(log.folder.glob("*.tmp")))
        kept = log.steps()
        # At most the append under way is there besides, and where it is, it is whole.
        assert kept in (list(range(first, acknowledged + 1)), list(range(first, acknowledged + 2)))
        for step in kept:
            check(BatchLog(log.folder), step)
        first = kept[-1] + 1
        log.drop_below(first + 1)
        assert list(log.folder.iterdir()) == []
    print(f"{first} steps appended, {kills} kills, {half_files} half-written files left behind and removed")
