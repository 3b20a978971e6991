"""Columns from metrics.jsonl while it grows, is cut and is written anew."""

from __future__ import annotations

import math
from pathlib import Path

import httpx
from tests.dashboard.recorded import write_config, write_rows

from penstock.common import append_jsonl
from penstock.dashboard import newest_row
from penstock.dashboard.metrics import MetricsFile, columns, staleness


def row(step: int, **values: object) -> dict[str, object]:
    return {"step": step, "reward": float(step), "wall_s": 4.0, "wait_s": 1.0, **values}


def test_a_step_that_is_trained_again_ends_what_was_behind_it(tmp_path: Path) -> None:
    write_rows(tmp_path, [row(0), row(1), row(2)])
    file = MetricsFile(tmp_path / "metrics.jsonl")
    assert [one["step"] for one in file.rows()] == [0, 1, 2]
    append_jsonl(tmp_path / "metrics.jsonl", [row(1, reward=9.0)])
    assert [(one["step"], one["reward"]) for one in file.rows()] == [(0, 0.0), (1, 9.0)]
    append_jsonl(tmp_path / "metrics.jsonl", [row(2)])
    assert [one["bubble"] for one in file.rows()] == [0.25] * 3


def test_the_newest_row_is_found_without_the_others(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert newest_row(file) is None
    write_rows(tmp_path, [row(step, note="x" * 1000) for step in range(200)])
    with file.open("a") as end:
        end.write('{"step": 200, "rew')
    assert newest_row(file)["step"] == 199


def test_many_steps_become_as_many_points_as_asked() -> None:
    rows = [row(step) for step in range(1000)]
    thin = columns(rows, ["reward", "absent"], 100)
    assert len(thin["steps"]) == 100
    assert (thin["steps"][0], thin["series"]["reward"][0]) == (9, 4.5)
    assert thin["series"]["absent"] == [None] * 100
    assert columns([row(0, reward=math.nan)], ["reward"], 10)["series"]["reward"] == [None], "JSON has no NaN"


def test_staleness_shares_add_up() -> None:
    told = staleness([row(0, staleness_tokens={"0": 30, "2": 10}), row(1)], 10)
    assert told == {"steps": [0], "ages": [0, 1, 2], "shares": [[0.75, 0.0, 0.25]]}


async def test_columns_are_asked_for_by_name(page: httpx.AsyncClient, tmp_path: Path) -> None:
    write_config(tmp_path / "mine", "trainer: {steps: 7}\n")
    write_rows(tmp_path / "mine", [row(0, note="text", eval=True), row(1)])
    answer = (await page.get("/api/runs/mine/metrics", params={"name": ["reward", "bubble"]})).json()
    assert answer["names"] == ["bubble", "reward", "wait_s", "wall_s"]
    assert answer["series"] == {"reward": [0.0, 1.0], "bubble": [0.25, 0.25]}
    for points in ("1", "100000", "x"):
        refused = await page.get(f"/api/runs/mine/metrics?points={points}")
        assert (refused.status_code, refused.json()["error"]["field"]) == (422, "query.points")
    assert (await page.get("/api/runs/mine/config")).json() == {"trainer.steps": 7}
    (listed,) = (await page.get("/api/runs")).json()
    assert (listed["name"], listed["steps"], listed["steps_planned"], listed["reward"]) == ("mine", 2, 7, 1.0)


async def test_a_password_in_the_settings_is_not_on_the_page(page: httpx.AsyncClient, tmp_path: Path) -> None:
    """A token that may only read would open the queue to writing."""
    write_config(tmp_path / "mine", "transfer_queue: {url: 'redis://owner:secret@host:6379/0'}\n")
    assert (await page.get("/api/runs/mine/config")).json() == {"transfer_queue.url": "redis://host:6379/0"}
