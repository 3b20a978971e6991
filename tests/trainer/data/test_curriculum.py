"""Curricula: shares of sources and pools, what a restart remembers, weights that change while a run trains."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.testing import MemoryTransferQueue
from penstock.trainer import WEIGHTS_FILE, CurriculumWeights, DatasetRow, RowPool, write_weights
from penstock.trainer.data.curriculum import Curriculum, CurriculumConfig, RoundRobin
from penstock.trainer.data.order import CurriculumTasks
from penstock.trainer.data.rows import Feeder
from penstock.transfer_queue import DataCursor, Limits

PLAIN = CurriculumConfig(easy=0.1, hard=0.1)
weights = st.floats(0.01, 100)


@given(st.lists(weights, min_size=1, max_size=6), st.integers(1, 300))
def test_a_share_is_kept_to_within_a_draw_per_key(given_weights: list[float], draws: int) -> None:
    shares = {str(number): weight for number, weight in enumerate(given_weights)}
    turns = RoundRobin()
    counts = Counter(turns.pick(shares) for _ in range(draws))
    for key, weight in shares.items():
        assert abs(counts[key] - draws * weight / sum(given_weights)) <= len(shares)


@given(st.lists(st.tuples(weights, st.booleans()), min_size=2, max_size=5), st.data())
def test_a_key_without_weight_is_never_picked(made: list[tuple[float, bool]], data: st.DataObject) -> None:
    turns = RoundRobin()
    for _ in range(20):
        off = data.draw(st.integers(0, len(made) - 1))
        picked = turns.pick({str(n): 0.0 if n == off else weight for n, (weight, _) in enumerate(made)})
        assert picked != str(off)


def test_a_sum_that_rounds_to_just_below_the_bound_has_passed() -> None:
    curriculum = Curriculum(["a"], CurriculumConfig(pass_reward=1.0), seed=1)
    assert [curriculum.has_passed(reward) for reward in (0.7 + 0.2 + 0.1, 0.9999)] == [True, False]


def test_sources_come_by_weight_and_rows_in_turn() -> None:
    sources = ["a"] * 3 + ["b"] * 5
    curriculum = Curriculum(sources, CurriculumConfig(sources={"b": 3.0}), seed=1)
    drawn = [curriculum.draw() for _ in range(40)]
    assert Counter(sources[row] for row in drawn) == {"a": 10, "b": 30}
    of_b = [row for row in drawn if sources[row] == "b"]
    assert all(sorted(of_b[n : n + 5]) == [3, 4, 5, 6, 7] for n in range(0, 30, 5))


def test_easy_and_hard_rows_come_seldom_and_can_return() -> None:
    curriculum = Curriculum(["a"] * 12, CurriculumConfig(easy=0.1, hard=0.1), seed=0, shuffle=False)
    for row in range(12):
        curriculum.observe(row, (1.0, 0.0, 0.5)[row % 3])
    assert pools(curriculum) == {"new": 0, "learnable": 4, "easy": 4, "hard": 4}
    counts = Counter(row % 3 for row in (curriculum.draw() for _ in range(120)))
    assert counts == {2: 100, 0: 10, 1: 10}
    curriculum.observe(1, 0.75)
    assert pools(curriculum) == {"new": 0, "learnable": 5, "easy": 4, "hard": 3}
    curriculum.observe(0, 0.5)
    assert pools(curriculum) == {"new": 0, "learnable": 6, "easy": 3, "hard": 3}


def test_a_pass_rate_is_a_moving_mean_of_groups() -> None:
    curriculum = Curriculum(["a"], PLAIN, seed=0)
    rates = []
    for share in (0.0, 1.0, 1.0, 1.0, 0.5):
        curriculum.observe(0, share)
        rates.append(curriculum.numbers()["curriculum/a/pass_rate"])
    assert rates == [0.0, 0.5, 0.75, 0.875, 0.6875]


def test_a_source_without_weighted_rows_does_not_run_dry() -> None:
    curriculum = Curriculum(["a", "a"], CurriculumConfig(easy=0.0), seed=0, shuffle=False)
    curriculum.observe(0, 1.0)
    curriculum.observe(1, 1.0)
    assert [curriculum.draw() for _ in range(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sources": {"a": -1.0}}, r"sources\.a"),
        ({"easy": float("inf")}, "easy"),
    ],
)
def test_settings_that_cannot_be_are_named(settings: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CurriculumConfig(**settings)


def test_names_of_no_source_and_weights_of_zero_are_named() -> None:
    with pytest.raises(ValueError, match="sources has c, the data has a, b"):
        Curriculum(["a", "b"], CurriculumConfig(sources={"c": 2.0}), seed=0)
    with pytest.raises(ValueError, match="the weight of every source is 0"):
        Curriculum(["a", "b"], CurriculumConfig(sources={"*": 0.0}), seed=0)


def test_a_restart_knows_what_the_checkpoint_knew(tmp_path: Path) -> None:
    """Steps that are trained again are observed again; those before them are remembered."""
    order, at = tasks_begun(tmp_path, 0), DataCursor()
    for step in range(4):
        tasks, at = order.next(at, 1)
        order.observe(step, {task.task_id: [1.0, 0.0] for task in tasks})
    again = tasks_begun(tmp_path, 3)
    assert [json.loads(line)["step"] for line in lines(tmp_path)] == [0, 1, 2]
    numbers = again.observe(3, {})
    assert numbers["curriculum/even/learnable"] + numbers["curriculum/odd/learnable"] == 3


def test_a_name_holds_its_place_and_its_row(tmp_path: Path) -> None:
    tasks, at = tasks_begun(tmp_path, 0).next(DataCursor(2, 7), 3)
    assert [task.task_id for task in tasks] == [
        f"train/0002/{7 + n:08d}/{task.ground_truth}" for n, task in enumerate(tasks)
    ]
    assert at == DataCursor(2, 10)


def test_results_about_other_rows_are_dropped_with_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    order = tasks_begun(tmp_path, 0)
    tasks, _ = order.next(DataCursor(), 2)
    order.observe(0, {task.task_id: [1.0] for task in tasks})
    other = CurriculumTasks(make_rows(3), PLAIN, tmp_path, seed=0)
    with caplog.at_level(logging.WARNING):
        other.begin(1)
    assert "other rows" in caplog.text
    assert other.observe(1, {})["curriculum/even/new"] == 2


def test_weights_change_while_the_run_trains(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    order = tasks_begun(tmp_path, 0)
    write_weights(tmp_path, CurriculumWeights(sources={"odd": 0.0}))
    tasks, at = order.next(DataCursor(), 6)
    assert {task.data_source for task in tasks} == {"even"}
    (tmp_path / WEIGHTS_FILE).write_text('{"sources": {"odd": -3}}')
    with caplog.at_level(logging.ERROR):
        tasks, at = order.next(at, 2)
        tasks += order.next(at, 2)[0]
    assert {task.data_source for task in tasks} == {"even"}
    assert caplog.text.count("sources.odd") == 1
    write_weights(tmp_path, CurriculumWeights(sources={"even": 0.0}))
    assert {task.data_source for task in order.next(at, 4)[0]} == {"odd"}


async def test_a_queue_that_lost_tasks_gets_new_names_only(tmp_path: Path) -> None:
    """After a restart, and after tasks of a run without a curriculum, no name is given twice."""
    limits = Limits(group_size=2, groups_per_step=2, max_staleness=0)
    queue, names = MemoryTransferQueue(), []
    await queue.create_run(limits, "")
    rows = make_rows(6)
    await queue.submit([rows[0].task("train/0000/00000000", "train")], cursor=DataCursor(0, 1))
    for _ in range(2):
        feeder = Feeder(queue, limits, tasks_of(tmp_path), steps=50)
        await feeder.start()
        while leases := await queue.lease_episodes("w", 50, 0):
            names += [lease.task.task_id for lease in leases if lease.member == 0]
    assert len(set(names)) == len(names)
    assert feeder.cursor >= DataCursor(0, 3)
    assert feeder.observe(0, {"train/0000/00000000": [1.0]})["curriculum/even/new"] == 3


def tasks_of(folder: Path) -> CurriculumTasks:
    return CurriculumTasks(make_rows(6), PLAIN, folder, seed=0)


def tasks_begun(folder: Path, step: int) -> CurriculumTasks:
    order = tasks_of(folder)
    order.begin(step)
    return order


def make_rows(count: int) -> list[DatasetRow]:
    return [
        DatasetRow([{"role": "user", "content": str(n)}], ("even", "odd")[n % 2], n, None, {}) for n in range(count)
    ]


def lines(folder: Path) -> list[str]:
    return (folder / "curriculum.jsonl").read_text().splitlines()


def pools(curriculum: Curriculum) -> dict[str, float]:
    return {str(pool): curriculum.numbers()[f"curriculum/a/{pool}"] for pool in RowPool}
