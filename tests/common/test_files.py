"""Files that are whole or absent, JSON lines and locks between real processes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.common import (
    FileLock,
    JsonlTail,
    NotPrivate,
    append_jsonl,
    atomic_path,
    end_last_line,
    iter_jsonl,
    last_by,
    open_private,
    private_folder,
    read_jsonl,
    rewrite_jsonl,
    write_atomically,
)
from penstock.common.files import FileLocked, fsync_tree, write_synced

HOLDER = """
import sys, time
from pathlib import Path
from penstock.common.files import FileLock
FileLock(Path(sys.argv[1]), "").acquire()
print("held", flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("durable", [False, True])
def test_write_atomically_replaces(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")
    write_atomically(path, [b"n", b"ew"], mode=0o600, durable=durable)
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_private_folder_is_made_once_and_entered_again(tmp_path: Path) -> None:
    for _ in range(2):
        private_folder(tmp_path / "a" / "b")
    assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")} == {0o700}


def foreign_folder(path: Path) -> Path:
    """Closed, and of another user: uid 12345, or root where we are not root."""
    if os.geteuid():
        return Path("/root")
    path.mkdir(mode=0o700)
    os.chown(path, 12345, 12345)
    return path


def open_folder(path: Path) -> Path:
    path.mkdir()
    path.chmod(0o770)
    return path


def linked_folder(path: Path) -> Path:
    path.symlink_to(path.parent)
    return path


def file(path: Path) -> Path:
    path.touch()
    return path


@pytest.mark.parametrize(
    ("squat", "found"),
    [(foreign_folder, "owner uid"), (open_folder, "drwxrwx---"), (linked_folder, "lrwx"), (file, "-rw")],
)
def test_private_folder_squatted(tmp_path: Path, squat: Callable[[Path], Path], found: str) -> None:
    path = squat(tmp_path / "x")
    with pytest.raises(NotPrivate) as told:
        private_folder(path)
    assert all(word in str(told.value) for word in (str(path), found, f"uid {path.lstat().st_uid}", "remove it"))


def test_open_private_takes_its_own_file_only(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with open_private(path, "xb") as opened:
        opened.write(b"one")
    with pytest.raises(NotPrivate, match=str(path)):
        open_private(path, "xb")
    path.chmod(0o666)
    with open_private(path, "a+b") as opened:
        opened.write(b" two")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"one two", 0o600)
    (tmp_path / "link").symlink_to(path)
    os.link(path, tmp_path / "second")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "second", "pipe"):
        with pytest.raises(NotPrivate, match=name):
            open_private(tmp_path / name, "a+b")


def test_atomic_path_failure_keeps_the_old(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def write_half() -> None:
        with atomic_path(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_write_synced_truncates(tmp_path: Path) -> None:
    write_synced(tmp_path / "file", b"longer")
    write_synced(tmp_path / "file", b"new")
    fsync_tree(tmp_path)
    assert (tmp_path / "file").read_bytes() == b"new"
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("broken", "steps"), [("stop", [0]), ("skip", [0, 2])])
def test_read_jsonl_with_a_broken_line(tmp_path: Path, broken, steps) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"step": 0}\n{"ste\n{"step": 2}\n')
    assert [line["step"] for line in read_jsonl(path, broken=broken)] == steps
    assert read_jsonl(tmp_path / "none") == []


def test_append_after_a_killed_writer(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    end_last_line(path)
    assert not path.exists()
    append_jsonl(path, [{"step": 0}])
    end_last_line(path)
    assert path.read_text() == '{"step": 0}\n'
    with path.open("a") as file:
        file.write('{"st')
    end_last_line(path)
    append_jsonl(path, [{"step": 1}, {"step": 2}])
    assert [line["step"] for line in read_jsonl(path, broken="skip")] == [0, 1, 2]


def test_rewrite_jsonl_creates_no_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    rewrite_jsonl(path, [])
    assert not path.exists()
    rewrite_jsonl(path, [{"text": "é"}])
    assert path.read_text(encoding="utf-8") == '{"text": "é"}\n'
    rewrite_jsonl(path, [])
    assert path.read_text() == ""


class CountedLine(dict[str, Any]):
    """A parsed line; `most` of them were alive at once."""

    alive = most = 0

    def __init__(self, plain: dict[str, Any]) -> None:
        super().__init__(plain)
        CountedLine.alive += 1
        CountedLine.most = max(CountedLine.most, CountedLine.alive)

    def __del__(self) -> None:
        CountedLine.alive -= 1


def test_a_file_of_many_lines_is_never_whole_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's files grow with its steps; the trainer rewrites, and the supervisor reads again, at each evaluation."""
    path = tmp_path / "lines.jsonl"
    append_jsonl(path, [{"step": step} for step in range(1000)])
    parse = json.loads
    monkeypatch.setattr(json, "loads", lambda text: CountedLine(parse(text)))
    monkeypatch.setattr(CountedLine, "most", 0)
    rewrite_jsonl(path, (line for line in iter_jsonl(path) if line["step"] < 900))
    assert sum(1 for _ in JsonlTail(path).lines()) == 900
    assert 1 <= CountedLine.most <= 3


def test_tail_gives_later_what_was_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    append_jsonl(path, [{"step": step} for step in range(3)])
    tail = JsonlTail(path)
    assert next(tail.lines()) == {"step": 0}
    assert tail.read() == [{"step": 1}, {"step": 2}]


def test_last_by_keeps_the_last_in_order() -> None:
    rows = [{"step": 1, "n": 0}, {"step": 0, "n": 1}, {"step": 1, "n": 2}]
    assert last_by(rows, "step") == [rows[1], rows[2]]


def test_tail_reads_each_line_once(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    tail = JsonlTail(path)
    assert tail.read() == []
    append_jsonl(path, [{"step": 0}, {"step": 1}])
    assert tail.read() == [{"step": 0}, {"step": 1}]
    assert tail.read() == []
    text = json.dumps({"step": 2}) + "\n"
    with path.open("a") as file:
        file.write(text[:4])
        file.flush()
        assert tail.read() == []
        file.write(text[4:])
    assert tail.read() == [{"step": 2}]


def test_tail_restarts_on_a_replaced_or_cut_file(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    tail = JsonlTail(path)
    append_jsonl(path, [{"step": 0}, {"step": 1}])
    tail.read()
    rewrite_jsonl(path, [{"step": 0, "eval": 1.0}, {"step": 1}, {"step": 2}])
    assert tail.read() == [{"step": 0, "eval": 1.0}, {"step": 1}, {"step": 2}]
    path.write_text('{"step": 3}\n')
    assert tail.read() == [{"step": 3}]


def test_tail_restarts_on_another_file_with_the_same_inode(tmp_path: Path) -> None:
    """A disk gives a freed inode to the next file: two replacements between two reads, and the tail's is back."""
    path = tmp_path / "lines.jsonl"
    tail = JsonlTail(path)
    append_jsonl(path, [{"step": 0, "loss": 0.25}, {"step": 1, "loss": 0.5}])
    tail.read()
    others = [{"step": step, "loss": 0.125, "eval/reward": 0.5} for step in range(3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in others))  # in place: the inode stays
    assert tail.read() == others


def test_tail_passes_over_a_line_that_is_no_json(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "lo\n{"step": 2}\n')
    assert JsonlTail(path).read() == [{"step": 0}, {"step": 2}]
    assert f"{path}: the line at byte 12 is not JSON" in caplog.text


@pytest.fixture
def holder(tmp_path: Path):
    """Another process that holds the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "lock")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_lock_held_elsewhere_names_path_and_cause(tmp_path: Path, holder) -> None:
    lock = FileLock(tmp_path / "lock", "another server is running there", error=ValueError)
    with pytest.raises(ValueError, match=r"lock: another server is running there$"):
        lock.acquire()
    assert not lock.held


@pytest.mark.crash
async def test_lock_is_free_when_its_holder_is_killed(tmp_path: Path, holder) -> None:
    lock, waited = FileLock(tmp_path / "lock", "still held"), []
    with pytest.raises(FileLocked, match="still held"):
        await lock.acquire_within(0)
    waiting = asyncio.create_task(lock.acquire_within(60, lambda: (waited.append(1), holder.kill())))
    await waiting
    assert lock.held
    assert waited == [1]


@pytest.mark.crash
async def test_wait_blocks_until_the_lock_is_free(tmp_path: Path, holder) -> None:
    lock = FileLock(tmp_path / "lock", "")
    waiting = asyncio.create_task(asyncio.to_thread(lock.wait))
    done, _ = await asyncio.wait({waiting}, timeout=0.2)
    assert not done
    holder.kill()
    async with asyncio.timeout(60):
        await waiting
    assert lock.held
    lock.release()


def test_lock_has_one_holder_in_a_process(tmp_path: Path) -> None:
    first, second = (FileLock(tmp_path / "lock", "held here") for _ in range(2))
    with first:
        for other in (first, second):
            with pytest.raises(FileLocked):
                other.acquire()
        assert not second.try_acquire()
        assert (first.held, second.held) == (True, False)
    first.release()
    with second:
        assert second.held
