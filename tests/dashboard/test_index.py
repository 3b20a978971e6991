"""The index of trajectories: complete, in order, and a cache that may vanish or lie damaged at any time."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.dashboard.recorded import ANSWER, CALL, record, said, told, write_config, write_step

from penstock.dashboard.trajectories import Query, TrajectoryIndex


def episodes(index: TrajectoryIndex, **wanted: object) -> list[str]:
    return [row["episode"] for row in index.page(Query(**wanted), 0, 500)[1]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    write_config(folder)
    write_step(folder, 0, [record(f"train/a#{m}", [said("first words", 0)], float(m)) for m in range(3)])
    write_step(
        folder, 1, [record("train/b#0", [said(CALL, 1), told(ANSWER), said("it is 42", 2)], None, kind="truncated")]
    )
    return folder


@contextlib.contextmanager
def index_of(run: Path, place: str = "trajectories.sqlite") -> Iterator[TrajectoryIndex]:
    index = TrajectoryIndex(run / "trajectories", run / place)
    yield index
    index.close()


@pytest.fixture
def index(run: Path) -> Iterator[TrajectoryIndex]:
    with index_of(run) as index:
        index.refresh(10)
        yield index


def test_newest_first_and_columns(index: TrajectoryIndex) -> None:
    assert episodes(index) == ["train/b#0", "train/a#0", "train/a#1", "train/a#2"]
    row = index.page(Query(), 0, 1)[1][0]
    assert (row["step"], row["outcome"], row["reward"], row["turns"], row["tool_calls"]) == (1, "truncated", None, 2, 1)
    assert (row["oldest"], row["newest"], row["snippet"], row["task"]) == (1, 2, "it is 42", "train/b")


def test_conditions_and_orders(index: TrajectoryIndex) -> None:
    assert episodes(index, outcome="truncated") == ["train/b#0"]
    assert episodes(index, reward_min=1, reward_max=1) == ["train/a#1"]
    assert episodes(index, step=0, order="reward") == ["train/a#2", "train/a#1", "train/a#0"]
    assert episodes(index, order="reward", descending=False)[-1] == "train/b#0", "no reward comes last both ways"
    assert episodes(index, task="train/a", descending=False) == ["train/a#0", "train/a#1", "train/a#2"]


def test_bounds_of_rewards_have_no_digits_of_rounding(run: Path) -> None:
    rounded = 0.7 + 0.2 + 0.1
    write_step(run, 2, [record("train/c#0", [said("words")], rounded), record("train/c#1", [said("words")], 0.999)])
    with index_of(run) as index:
        index.refresh(10)
        assert episodes(index, reward_min=1, step=2) == ["train/c#0"]
        assert episodes(index, reward_max=rounded, reward_min=0.9995) == ["train/c#0", "train/a#1"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("PRINT(6*7)", 1),
        ("42\n</tool", 1),
        ("train/a#1", 1),
        ("What is", 4),
        ("%", 0),
        ("_", 1),
        ("'; DROP TABLE files", 0),
    ],
)
def test_text_is_searched_as_it_is(index: TrajectoryIndex, text: str, found: int) -> None:
    assert index.page(Query(text=text), 0, 10)[0] == found


def test_a_step_that_is_trained_again_replaces_itself(index: TrajectoryIndex, run: Path) -> None:
    assert index.record("train/b#0", 1)["num_turns"] == 2
    write_step(run, 1, [record("train/c#0", [said("another")])])
    assert index.record("train/b#0", 1) is None, "the place in the file holds something else now"
    generation = index.generation
    assert index.refresh(10) == 0
    assert index.generation > generation
    assert episodes(index, step=1) == ["train/c#0"]
    (run / "trajectories" / "step_000000.jsonl").unlink()
    index.refresh(10)
    assert episodes(index) == ["train/c#0"]


def test_work_stops_at_the_budget_and_goes_on(tmp_path: Path) -> None:
    for step in range(5):
        write_step(tmp_path, step, [record(f"train/{step}#0", [said("x")])])
    with index_of(tmp_path) as index:
        assert [index.refresh(0) for _ in range(5)] == [4, 3, 2, 1, 0]
        assert episodes(index)[0] == "train/4#0"


def test_two_pages_share_an_index(index: TrajectoryIndex, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(episodes(index)) == 4
    with index_of(run) as other:
        with monkeypatch.context() as patch:
            patch.setattr(other, "_read_file", lambda *_: pytest.fail("it was indexed already"))
            assert other.refresh(10) == 0
        assert len(episodes(other)) == 4
        write_step(run, 1, [record("train/c#0", [said("another")])])
        other.refresh(10)
    assert "train/c#0" in episodes(index)
    assert index.refresh(10) == 0
    assert len(episodes(index)) == 4


def test_pages_of_a_search_read_the_texts_once(index: TrajectoryIndex) -> None:
    statements: list[str] = []
    index._database.set_trace_callback(statements.append)
    pages = [index.page(Query(text="first"), offset, 1) for offset in range(4)]
    assert [(total, len(rows)) for total, rows in pages] == [(3, 1), (3, 1), (3, 1), (3, 0)]
    assert sum("LIKE" in statement for statement in statements) == 1


def of_another_shape(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.executescript("CREATE TABLE files(other); PRAGMA user_version = 999;")


@pytest.mark.parametrize(
    ("place", "spoil"),
    [
        ("trajectories.sqlite", lambda path: path.write_bytes(b"no database at all" * 100)),
        ("trajectories.sqlite", lambda path: path.write_bytes(b"")),
        ("trajectories.sqlite", of_another_shape),
        ("nowhere/trajectories.sqlite", lambda path: None),
    ],
    ids=["damaged", "empty", "of another shape", "cannot be written"],
)
def test_an_index_that_cannot_be_used_is_made_anew(run: Path, place: str, spoil: Callable[[Path], None]) -> None:
    spoil(run / place)
    with index_of(run, place) as index:
        index.refresh(10)
        assert len(episodes(index)) == 4


def test_a_line_that_is_no_trajectory_hides_no_other(tmp_path: Path) -> None:
    path = write_step(tmp_path, 0, [record("train/a#0", [said("x")])])
    whole = path.read_text()
    path.write_text("[1]\n{}\n" + whole + '{"episode_id": "cut')
    with index_of(tmp_path) as index:
        index.refresh(10)
        assert episodes(index) == ["train/a#0"]
        assert index.record("train/a#0", 0) == json.loads(whole)


async def test_trajectories_over_http(page: httpx.AsyncClient, run: Path) -> None:
    answer = (await page.get("/api/runs/mine/trajectories", params={"limit": 2, "offset": 1})).json()
    assert (answer["total"], answer["pending"]) == (4, 0)
    assert [row["episode"] for row in answer["rows"]] == ["train/a#0", "train/a#1"]
    assert (await page.get("/api/runs/mine/trajectories", params={"colour": "red"})).status_code == 422
    called, answered, _ = await runs_of(page, "train/b#0", 1)
    assert [(call["name"], call["arguments"]) for call in called["calls"]] == [("python", {"code": "print(6*7)"})]
    assert "".join(called["pieces"]) == called["text"]
    assert (answered["calls"], answered["pieces"]) == ([], [ANSWER])
    missing = await page.get("/api/runs/mine/trajectory", params={"episode": "train/z#0", "step": 1})
    assert (missing.status_code, missing.json()["error"]["field"]) == (404, "episode")
    write_config(run, "agent: {parser: auto}")  # names no parser; each episode says which one read it
    write_step(run, 2, [record("train/c#0", [said(CALL, 1)], parser="hermes")])
    await page.get("/api/runs/mine/trajectories")
    assert [call["name"] for call in (await runs_of(page, "train/c#0", 2))[0]["calls"]] == ["python"]


async def runs_of(page: httpx.AsyncClient, episode: str, step: int) -> list[dict[str, Any]]:
    answer = (await page.get("/api/runs/mine/trajectory", params={"episode": episode, "step": step})).json()
    runs: list[dict[str, Any]] = answer["segments"][0]["runs"]
    return runs


async def test_images_of_a_record_are_served_by_their_name(run: Path, page: httpx.AsyncClient) -> None:
    """Pictures alone: what else an episode brought, and names that lead elsewhere, are not there."""
    folder = run / "images"
    folder.mkdir()
    for name, data in (("a" * 64, b"\x89PNG and so on"), ("b" * 64, b"<svg onload='1'/>"), ("c" * 63, b"\x89PNG")):
        (folder / name).write_bytes(data)
    found = await page.get("/api/runs/mine/image", params={"name": "a" * 64})
    assert (found.status_code, found.content) == (200, b"\x89PNG and so on")
    assert found.headers["content-type"] == "image/png"
    for name in ("b" * 64, "c" * 63, "d" * 64, "../config.yaml", "A" * 64):
        refused = await page.get("/api/runs/mine/image", params={"name": name})
        assert (refused.status_code, refused.json()["error"]["field"]) == (404, "name")
