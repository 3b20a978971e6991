"""Trainers that come back to a published version with other weights, after the machine took the version's file along.

Whatever brought them there: no number names two sets of weights, the run ends, and its accounts balance.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from typing import Any

import pytest
from kill_stage import EPISODES_A_STEP, KILLED, SETTINGS, STEPS, KilledRun, Nursery

pytestmark = [
    pytest.mark.deep,
    pytest.mark.redis,
    pytest.mark.torch,
    pytest.mark.crash,
    pytest.mark.asyncio(loop_scope="session"),
]


def learn_faster(run: KilledRun) -> None:
    """A step that is passed is no bad one."""
    run.settings = {**SETTINGS, "lr": 1e-2, "max_bad_steps": 0}


def damage_newest_checkpoint(run: KilledRun) -> None:
    newest = max((run.root / "checkpoints").glob("step_????????"))
    largest = max(newest.rglob("*.distcp"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])


def cut_archive(run: KilledRun) -> None:
    """Of two steps that Redis holds no more, one has lost its file and the other the end of it."""
    first, second = (next((run.root / "archive" / "batches").glob(f"{step:08d}-*")) for step in (3, 4))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])


LIVES: dict[str, tuple[tuple[str, int], int, Callable[[KilledRun], None], int]] = {
    "other settings, the next step is not sampled": (("after_publish", 5), 5, learn_faster, 0),
    "other settings, the next step is fixed": (("after_publish", 5), 7, learn_faster, 0),
    "a damaged checkpoint": (("after_commit", 3), STEPS, damage_newest_checkpoint, 0),
    "a cut archive": (("after_spill", 4), STEPS, cut_archive, 2 * EPISODES_A_STEP),
}
"""The gap in which the first life dies, steps that are sampled until then, what is done before the second, and how many
episodes it costs."""


@pytest.mark.parametrize("name", LIVES)
async def test_no_version_names_two_sets_of_weights(
    make: Callable[[str], KilledRun], nursery: Nursery, name: str
) -> None:
    (gap, passes), sampled, change, lost = LIVES[name]
    run = make("run")
    async with run.worker() as worker:
        worker.steps = sampled
        assert await run.live(nursery, gap, passes) == KILLED
        shutil.rmtree(run.folder / "weights")
        change(run)
        worker.steps = 2 * STEPS
        assert await run.live(nursery) == 0
    written = [json.loads(line) for line in (run.folder / "versions.jsonl").read_text().splitlines()]
    # Weights whose file went with the machine may be written again, under the number that they have.
    versions = {(version, digest) for version, digest in written}
    assert sorted(version for version, _ in versions) == list(range(1, STEPS + 1)), "each has one set of weights"
    await check_accounts(run, lost)


async def check_accounts(run: KilledRun, lost: int) -> None:
    queue = await run.queue()
    try:
        status, held = await queue.status(), await queue.held()
        await queue.drop_run()
    finally:
        await queue.close()
    groups: dict[str, Any] = dict(status.groups)
    assert (status.version, status.committed_step) == (STEPS, STEPS)
    assert groups.pop("submitted") == sum(groups.values())
    assert (groups["shipped"], groups["trained"]) == (0, 0)
    episodes = status.episodes
    reasons = sum(episodes[name] for name in ("dropped", "filtered", "unrewarded", "group_failed", "payload_lost"))
    assert episodes["completed"] == episodes["committed"] + len(held) + reasons
    assert episodes["payload_lost"] == lost
    assert episodes["trained"] == episodes["committed"] == 4 * groups["committed"]
    lines = [json.loads(line) for line in (run.root / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert all(line["tokens_masked"] == 0 for line in lines), "nothing over the bound is trained on"
