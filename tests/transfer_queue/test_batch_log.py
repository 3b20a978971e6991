"""The batch log: what was appended is read back, by any process, or the damage is named.

kill -9 in the middle of an append: what was said to be durable is there, and of the rest nothing or all.
"""

from __future__ import annotations

import os
import random
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from penstock.common import fsync_path
from penstock.transfer_queue import BadPayload, BatchLog

HEAD_BYTES = 40
"""In front of the table of contents."""
A, B, C = "train/0000/00000001#0", "train/0000/00000001#1", "train/0000/00000002#0"
FILE = "00000001-00000001-w.batch"


@pytest.fixture
def log(tmp_path: Path) -> BatchLog:
    return BatchLog(tmp_path / "run" / "batches")


def only_file(log: BatchLog) -> Path:
    (path,) = log.folder.iterdir()
    return path


def test_what_was_appended_is_read_in_the_order_asked(log: BatchLog) -> None:
    log.append(3, {A: b"alpha", B: b""}, "rank0")
    log.append(3, {C: b"gamma"}, "rank1")
    assert list(log.read(3, [C, A, B]).items()) == [(C, b"gamma"), (A, b"alpha"), (B, b"")]
    assert log.read(None, [B, C, B]) == {B: b"", C: b"gamma"}
    assert log.read(3, []) == {}


def test_a_repeat_is_harmless_and_repairs_what_was_damaged(log: BatchLog) -> None:
    log.append(2, {A: b"alpha", B: b"beta"}, "w")
    flip(only_file(log), -1)
    log.append(2, {A: b"alpha", B: b"beta"}, "w")
    assert log.read(2, [A, B]) == {A: b"alpha", B: b"beta"}
    assert log.steps() == [2]


def test_committed_steps_go_and_left_overs_of_killed_writers_too(log: BatchLog) -> None:
    for step in (1, 2, 10):
        log.append(step, {f"e{step}": bytes([step])}, "w")
    (log.folder / "00000001-00000009-v.batch.tmp").write_bytes(b"half")
    (log.folder / "00000010-00000009-v.batch.tmp").write_bytes(b"half")
    (log.folder / "notes.txt").write_text("not ours")
    assert log.read(None, ["e1"]) == {"e1": b"\1"}
    assert log.drop_below(10) == 3
    assert log.drop_below(10) == 0
    assert log.steps() == [10]
    assert log.read(None, ["e10"]) == {"e10": b"\n"}
    with pytest.raises(BadPayload, match=r"e1: not in the batch log .*batches$"):
        log.read(None, ["e1"])
    with pytest.raises(BadPayload, match=r"e10: not in the batch log .*batches, step 2"):
        log.read(2, ["e10"])
    assert sorted(p.name for p in log.folder.iterdir())[1:] == ["00000010-00000009-v.batch.tmp", "notes.txt"]


def test_tables_of_dropped_files_are_forgotten_by_every_process(log: BatchLog) -> None:
    reader = BatchLog(log.folder)
    for step in range(5):
        log.append(step, {f"e{step}": b"x"}, "w")
        reader.read(None, [f"e{step}"])
        log.drop_below(step)
    assert [path.name for path in reader._tables] == ["00000003-00000004-w.batch", "00000004-00000005-w.batch"]


def test_before_anything_is_appended_there_is_nothing(log: BatchLog) -> None:
    assert (log.steps(), log.drop_below(9), log.read(None, [])) == ([], 0, {})
    log.append(0, {}, "w")
    assert not log.folder.exists()
    with pytest.raises(BadPayload, match="not in the batch log"):
        log.read(None, [A])


def test_a_file_is_as_its_format_says(log: BatchLog) -> None:
    """Head, table, payloads: byte for byte, as another build reads it."""
    log.append(3, {A: b"alpha", B: b""}, "w")
    rows = [(A, b"alpha"), (B, b"")]
    table = b"".join(
        struct.pack("<HQQ", len(name), len(blob), xxh3_64_intdigest(blob)) + name.encode() for name, blob in rows
    )
    head = struct.pack("<4sHHQIIQ", b"PNBL", 1, 0, 3, 2, len(table), xxh3_64_intdigest(table))
    assert only_file(log).name == "00000003-00000001-w.batch"
    assert only_file(log).read_bytes() == head + struct.pack("<Q", xxh3_64_intdigest(head)) + table + b"alpha"


def test_only_the_owner_may_read(log: BatchLog) -> None:
    log.append(0, {A: b"secret"}, "w")
    assert stat.S_IMODE(log.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(only_file(log).stat().st_mode) == 0o600


def test_what_was_appended_outlives_the_machine(log: BatchLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is durable once its folder is synced: the log's after the rename, and its parent's after the log's."""
    synced: list[tuple[Path, list[str]]] = []

    def counted(path: Path) -> None:
        fsync_path(path)
        synced.append((path, sorted(one.name for one in path.iterdir())))

    monkeypatch.setattr("penstock.transfer_queue.batch_log.fsync_path", counted)
    for step in (1, 2):
        log.append(step, {A: b"first"}, "w")
    first, second = "00000001-00000001-w.batch", "00000002-00000002-w.batch"
    assert synced == [
        (log.folder.parent, [log.folder.name]),
        (log.folder, [first]),
        (log.folder, [first, second]),
    ]


@pytest.mark.parametrize("writer", ["", "a/b", "../x", "w" * 65, "a b", "ä"])
def test_a_writer_that_is_no_name_is_refused(log: BatchLog, writer: str) -> None:
    with pytest.raises(ValueError, match="writer is"):
        log.append(0, {A: b"a"}, writer)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def with_version(path: Path, version: int) -> None:
    """A file of a later build: everything else is right."""
    data = path.read_bytes()
    preamble = data[:4] + struct.pack("<H", version) + data[6:32]
    path.write_bytes(preamble + struct.pack("<Q", xxh3_64_intdigest(preamble)) + data[HEAD_BYTES:])


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: flip(path, 0), "magic"),
    (lambda path: with_version(path, 2), "format: version 2 is unknown; this build reads version 1"),
    (lambda path: flip(path, 16), "head: wrong checksum"),
    (lambda path: flip(path, HEAD_BYTES + 3), "table: wrong checksum"),
    (lambda path: os.truncate(path, 0), "head: 0 bytes of 40; the file is cut short"),
    (lambda path: os.truncate(path, HEAD_BYTES + 5), r"table: 5 bytes of \d+; the file is cut short"),
    (lambda path: os.truncate(path, path.stat().st_size - 1), "length: .*; cut short or overwritten"),
    (lambda path: path.write_bytes(path.read_bytes() + b"x"), "length: .*; cut short or overwritten"),
    (lambda path: path.rename(path.with_name(path.name.replace("00000005", "00000006", 1))), "step: 5 inside, 6 by"),
]


@pytest.mark.parametrize(("damage", "what"), DAMAGES)
def test_a_damaged_file_is_named_and_the_others_are_read(
    log: BatchLog, damage: Callable[[Path], object], what: str
) -> None:
    log.append(5, {A: b"alpha"}, "w")
    damage(only_file(log))
    log.append(5, {B: b"beta"}, "v")
    assert log.read(None, [B]) == {B: b"beta"}
    named = rf"{A}: not in .*; files that cannot be read: 0000000\d-00000001-w.batch: {what}"
    for fresh in (log, BatchLog(log.folder)):
        with pytest.raises(BadPayload, match=named):
            fresh.read(None, [B, A])


def test_a_damaged_payload_is_named_and_its_neighbour_is_read(log: BatchLog) -> None:
    log.append(5, {A: b"alpha", B: b"beta"}, "w")
    flip(only_file(log), -1)
    assert log.read(5, [A]) == {A: b"alpha"}
    with pytest.raises(BadPayload, match=f"00000005-00000001-w.batch: {B}: payload: wrong checksum"):
        log.read(5, [A, B])


def test_a_file_cut_after_its_table_was_read_is_noticed(log: BatchLog) -> None:
    log.append(5, {A: b"alpha"}, "w")
    log.read(5, [A])
    os.truncate(only_file(log), only_file(log).stat().st_size - 2)
    with pytest.raises(BadPayload, match=f"{A}: payload: 3 bytes of 5; the file is cut short"):
        log.read(5, [A])


def test_a_file_deleted_before_it_is_opened_is_passed_over(log: BatchLog) -> None:
    """Another process has committed its step meanwhile. A link to nothing is listed too, and cannot be opened."""
    log.append(5, {A: b"alpha"}, "w")
    (log.folder / "00000004-00000002-v.batch").symlink_to(log.folder / "gone")
    for reader in (log, BatchLog(log.folder)):
        assert reader.read(None, [A]) == {A: b"alpha"}
        with pytest.raises(BadPayload, match=f"{B}: not in the batch log [^;]*$"):
            reader.read(None, [B])


def test_a_payload_deleted_before_it_is_read_is_named(log: BatchLog) -> None:
    log.append(5, {A: b"alpha"}, "w")
    log.read(5, [A])
    path = only_file(log)
    path.unlink()
    path.symlink_to(log.folder / "gone")
    with pytest.raises(BadPayload, match=f"{path.name} was deleted while it was read"):
        log.read(5, [A])


@pytest.mark.parametrize("begun", [True, False])
def test_a_full_disk_leaves_no_half_file_and_a_repeat_succeeds(
    log: BatchLog, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    def full(path: Path, parts: object) -> None:
        if begun:
            path.write_bytes(b"half")
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("penstock.transfer_queue.batch_log.write_synced", full)
        with pytest.raises(OSError, match="No space left"):
            log.append(1, {A: b"a"}, "w")
    assert list(log.folder.iterdir()) == []
    log.append(1, {A: b"a"}, "w")
    assert log.read(1, [A]) == {A: b"a"}


def test_threads_append_and_read_at_once(log: BatchLog) -> None:
    """Each reads its own back at once; nobody's append takes another's name."""

    def work(thread: int) -> None:
        for step in range(8):
            name = f"{thread}/{step}"
            log.append(step, {name: name.encode() * 100}, "one")
            assert log.read(None, [name]) == {name: name.encode() * 100}

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(work, range(6))) == [None] * 6
    assert log.steps() == list(range(8))
    assert len(list(log.folder.iterdir())) == 48


@settings(max_examples=80)
@given(at=st.integers(0, 400), bit=st.integers(0, 7), cut=st.booleans())
def test_no_damage_ever_gives_other_bytes(
    tmp_path_factory: pytest.TempPathFactory, at: int, bit: int, cut: bool
) -> None:
    log = BatchLog(tmp_path_factory.mktemp("log"))
    blobs = {A: b"alpha" * 20, B: b"", C: bytes(range(150))}
    log.append(1, blobs, "w")
    data = bytearray(only_file(log).read_bytes())
    at %= len(data)
    data[at] ^= 1 << bit
    only_file(log).write_bytes(data[:at] if cut else data)
    answers = {name: answer(log, name) for name in blobs}
    assert all(
        found == blobs[name] or (isinstance(found, str) and name in found and FILE in found)
        for name, found in answers.items()
    )
    assert at >= HEAD_BYTES or all(isinstance(found, str) for found in answers.values())


def answer(log: BatchLog, name: str) -> bytes | str:
    """The payload, or what was complained of."""
    try:
        return log.read(1, [name])[name]
    except BadPayload as error:
        return str(error)


IDS = st.text(min_size=1, max_size=12)
BLOBS = st.dictionaries(IDS, st.binary(max_size=300), max_size=5)
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 4), BLOBS, st.sampled_from(["rank0", "rank-1.x"])),
        st.tuples(st.just("drop"), st.integers(0, 6), st.just({}), st.just("")),
    ),
    max_size=12,
)


@settings(max_examples=30)
@given(calls=CALLS)
def test_any_calls_leave_what_a_dictionary_holds(
    tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[str, int, dict[str, bytes], str]]
) -> None:
    log = BatchLog(tmp_path_factory.mktemp("log") / "batches")
    model: dict[int, dict[str, bytes]] = {}
    latest: list[tuple[int, dict[str, bytes]]] = []
    for call, step, blobs, writer in calls:
        if call == "append":
            log.append(step, blobs, writer)
            if blobs:
                model.setdefault(step, {}).update(blobs)
                latest.append((step, blobs))
        else:
            log.drop_below(step)
            model = {kept: held for kept, held in model.items() if kept >= step}
            latest = [(kept, held) for kept, held in latest if kept >= step]
        for reader in (log, BatchLog(log.folder)):
            assert reader.steps() == sorted(model)
            for kept, held in model.items():
                assert reader.read(kept, held) == held
            newest = {name: blob for _, held in latest for name, blob in held.items()}
            assert reader.read(None, newest) == newest


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


def check_step(log: BatchLog, step: int) -> None:
    expected = {f"{step}#{n}": bytes([step % 256, n]) * 300_000 for n in range(4)}
    assert log.read(step, expected) == expected
    assert log.read(None, expected) == expected


@pytest.mark.crash
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
            check_step(BatchLog(log.folder), step)
        first = kept[-1] + 1
        log.drop_below(first + 1)
        assert list(log.folder.iterdir()) == []
    print(f"{first} steps appended, {kills} kills, {half_files} half-written files left behind and removed")
