"""All ranks together find the newest whole checkpoint: whoever has the damaged file, all take the one before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from restoring_ranks import ODD, WORLD
from trainer_support import run_ranks

from penstock.trainer.state.checkpoint import CheckpointStore, read_timeout_s
from penstock.trainer.state.restore import newest_whole, shares_of
from penstock.transfer_queue import DataCursor

pytestmark = pytest.mark.torch
SIZES = {"a": 400, "b": 300, "c": 300, "d": 200, "sub/e": 100, "f": 1}
DAMAGED = [f"damaged {rank}" for rank in range(WORLD)]


def make_checkpoint(store: CheckpointStore, step: int) -> Path:
    folder = store.unfinished(step)
    for name, size in SIZES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes([step]) * size)
    return store.seal(step, DataCursor(step, 3), WORLD, {}).path


def make_two(folder: Path) -> CheckpointStore:
    store = CheckpointStore(folder / "checkpoints", keep=2)
    store.open()
    for step in (1, 2):
        make_checkpoint(store, step)
    return store


def files_of(store: CheckpointStore) -> dict[str, Any]:
    marked = store.newest_marked()
    assert marked is not None
    return dict(marked.files)


def damage(path: Path) -> None:
    path.write_bytes(b"x" + path.read_bytes()[1:])


def start_ranks(folder: Path, cases: list[str]) -> Path:
    run_ranks("restoring_ranks.py", folder, *cases)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("restoring")
    for rank, case in enumerate(DAMAGED):
        store = make_two(folder / case)
        damage(store.folder / "step_00000002" / max(shares_of(files_of(store), WORLD)[rank]))
    for case in ("whole", "nothing whole"):
        make_two(folder / case)
    for step in (1, 2):
        (folder / "nothing whole" / "checkpoints" / f"step_0000000{step}" / "b").unlink()
    return start_ranks(folder, ["whole", *DAMAGED, "nothing whole"])


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    for case in ("killed", "late"):
        make_two(folder / case)
    return start_ranks(folder, ["killed", "late", "slow writer", "short writer"])


def said(runs: Path, case: str) -> list[dict[str, Any]]:
    found = [runs / case / f"found_{rank}" for rank in range(WORLD)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in found]


def test_shares_are_of_the_same_size_and_have_each_file_once() -> None:
    files = {name: {"bytes": size, "xxh3": "0"} for name, size in SIZES.items()}
    shares = shares_of(files, 3)
    assert [sorted(share) for share in shares] == [["a", "f"], ["b", "d"], ["c", "sub/e"]]
    assert sorted(name for share in shares for name in share) == sorted(SIZES)
    assert shares == shares_of(dict(reversed(files.items())), 3)
    assert [len(share) for share in shares_of({"a": files["a"]}, 3)] == [1, 0, 0]


def test_a_share_has_time_for_its_bytes() -> None:
    assert read_timeout_s(40 * 10**9) == read_timeout_s(0) + 2000.0


def test_one_rank_alone_reads_everything_and_passes_over_what_is_damaged(
    tmp_path: Path, ranks: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_two(tmp_path)
    found = newest_whole(store, ranks)
    assert found is not None
    assert (found.step, found.data_cursor) == (2, DataCursor(2, 3))
    damage(found.path / "sub" / "e")
    found = newest_whole(store, ranks)
    assert found is not None
    assert (found.step, found.data_cursor, store.damaged) == (1, DataCursor(1, 3), 1)
    assert "step_00000002 is damaged (sub/e differs from its checksum); taking the one before" in caplog.text
    (found.path / "a").unlink()
    assert newest_whole(store, ranks) is None
    assert "No such file" in caplog.text
    assert store.damaged == 2


def test_each_rank_reads_its_share_and_no_file_twice(runs: Path) -> None:
    found = said(runs, "whole")
    assert [one["step"] for one in found] == [2] * WORLD
    read = [name for one in found for name in one["read"]]
    assert sorted(read) == sorted(set(read))
    assert len(read) == len(SIZES)
    assert all(one["read"] for one in found)


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_in_any_ranks_share_makes_all_take_the_one_before(runs: Path, case: str) -> None:
    found = said(runs, case)
    assert [one["step"] for one in found] == [1] * WORLD
    assert found[0]["damaged"] == 1
    assert sorted(path.name for path in (runs / case / "checkpoints").iterdir()) == [
        "step_00000001",
        "step_00000002.damaged",
    ]
    assert "differs from its checksum); taking the one before" in (runs / case / "log").read_text()


def test_where_none_is_whole_all_ranks_begin_anew(runs: Path) -> None:
    found = said(runs, "nothing whole")
    assert [one["step"] for one in found] == [None] * WORLD
    assert found[0]["damaged"] == 2


@pytest.mark.deep
def test_a_rank_that_dies_while_it_reads_ends_the_others(faults: Path) -> None:
    assert json.loads((faults / "killed" / "ended.json").read_text())[str(ODD)] == -9
    others = [one for rank, one in enumerate(said(faults, "killed")) if rank != ODD]
    assert all("RuntimeError" in one["error"] for one in others)
    assert f"Ranks {ODD} failed" in others[0]["error"]


@pytest.mark.deep
def test_a_rank_that_is_late_is_named_by_all(faults: Path) -> None:
    for one in said(faults, "late"):
        assert one["error"].startswith("CheckpointNotRead")
        assert f"rank {ODD} has not read its" in one["error"]
        assert "step_00000002" in one["error"]
    assert (faults / "late" / "checkpoints" / "step_00000002").exists(), "late is not damaged"


@pytest.mark.deep
def test_ranks_wait_for_the_one_that_writes_longest(faults: Path) -> None:
    """Longer than any other collective may take; without the deadline by bytes the save ends with an error."""
    assert said(faults, "slow writer") == [{"step": 1}] * WORLD
    assert any("error" in one for one in said(faults, "short writer"))
